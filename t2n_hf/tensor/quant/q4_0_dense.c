/*
 * Q4_0 weights from the layout of torch's int4 kernel to plain numbers. Compiled by native.py.
 *
 * packed   for each group of 2 * half rows, each column k and each j below half, one byte: the quant of row j, and above
 *          it that of row half + j
 * scales   (columns / 32, padded), either pairs of bf16: the scale, and 2^-40 times what rounding it to bf16 took away,
 *          or halves: the scale as f16
 * out      (columns, count): column k of rows start .. start + count, which are whole groups
 *
 * A value is (quant - 8) * scale, computed in f32, where it is exact, and rounded once to the nearest, ties to even.
 */
#include <stdint.h>
#include <string.h>

#define BLOCK 32
#define MOST_HALF 32

static inline float number(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float of_pair(uint32_t pair)
{
    return number(pair << 16) + number(pair & 0xFFFF0000u) * 0x1p40f;
}

static inline float of_half(uint16_t half)
{
    uint32_t body = half & 0x7FFFu;
    float magnitude = body < 0x400 ? (float)(int32_t)body * 0x1p-24f : number((body << 13) + (112u << 23));
    return half & 0x8000u ? -magnitude : magnitude;
}

static inline uint16_t as_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float as_f32(float value)
{
    return value;
}

#define DEFINE_DENSE(NAME, TYPE, ROUND, SCALE, EXACT)                                                                  \
    void NAME(const uint8_t *packed, const SCALE *scales, int64_t columns, int64_t padded, int64_t half,               \
              int64_t start, int64_t count, TYPE *out)                                                                 \
    {                                                                                                                  \
        for (int64_t first = 0; first < count; first += 2 * half) {                                                    \
            const uint8_t *bytes = packed + (start + first) * columns / 2;                                             \
            for (int64_t block = 0; block < columns / BLOCK; ++block) {                                                \
                const SCALE *held = scales + block * padded + start + first;                                           \
                float low[MOST_HALF], high[MOST_HALF];                                                                 \
                for (int64_t j = 0; j < half; ++j) {                                                                   \
                    low[j] = EXACT(held[j]);                                                                           \
                    high[j] = EXACT(held[half + j]);                                                                   \
                }                                                                                                      \
                for (int64_t k = 0; k < BLOCK; ++k, bytes += half) {                                                   \
                    TYPE *row = out + (block * BLOCK + k) * count + first;                                             \
                    for (int64_t j = 0; j < half; ++j) {                                                               \
                        row[j] = ROUND((float)((int32_t)(bytes[j] & 15) - 8) * low[j]);                                \
                        row[half + j] = ROUND((float)((int32_t)(bytes[j] >> 4) - 8) * high[j]);                        \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_DENSE(dense_bf16_pairs, uint16_t, as_bf16, uint32_t, of_pair)
DEFINE_DENSE(dense_f32_pairs, float, as_f32, uint32_t, of_pair)
DEFINE_DENSE(dense_bf16_halves, uint16_t, as_bf16, uint16_t, of_half)
DEFINE_DENSE(dense_f32_halves, float, as_f32, uint16_t, of_half)
