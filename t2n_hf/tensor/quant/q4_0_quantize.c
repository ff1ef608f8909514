/*
 * Q4_0 blocks of rows of floats. Compiled by native.py; the rule, and the numbers bit for bit, are those of
 * quantize_rows in q4_0_blocks.py, where the layout of a block is described.
 *
 * values   (blocks, 32): bf16, f16 or f32, of which the bits are given
 * out      (blocks, 18)
 *
 * Returns 0; 1, and leaves anything in out, when a value is NaN, infinite or too large for a scale in f16.
 */
#include <stdint.h>
#include <string.h>

#define BLOCK 32
#define HALF 16
#define BLOCK_NBYTES 18
#define MANY 64
/* 8 * 65520, from where on an eighth is no finite f16: the bits of that f32, as of all that is larger, and of NaN. */
#define TOO_LARGE 0x48FFF000u

static inline float number(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Nearest, ties to even; for a magnitude below 65520. The sum with a half rounds to steps of the smallest f16. */
static inline uint16_t as_half(float value)
{
    uint32_t bits = bits_of(value), body = bits & 0x7FFFFFFFu;
    uint32_t normal = (body - (112u << 23) + 0xFFFu + (body >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(number(body) + 0.5f) - bits_of(0.5f);
    return (uint16_t)((bits >> 16 & 0x8000u) | (body < 0x38800000u ? subnormal : normal));
}

static inline float of_half(uint16_t half)
{
    uint32_t body = half & 0x7FFFu;
    float subnormal = (float)(int32_t)body * 0x1p-24f;
    float finite = body < 0x400 ? subnormal : number((body << 13) + (112u << 23));
    float magnitude = body < 0x7C00 ? finite : number(0x7F800000u | body << 13);
    return half & 0x8000u ? -magnitude : magnitude;
}

static inline float of_bf16(uint16_t value)
{
    return number((uint32_t)value << 16);
}

/*
 * The number of largest magnitude of a block, the first one among equals. Magnitudes are ordered as their bits are: the
 * largest as signed integers is the largest of the positive ones, and as unsigned integers the deepest negative one. When
 * all are of one sign, both are the same number.
 */
#define DEFINE_LARGEST(NAME, BITS, SIGNED, MAGNITUDE)                                                                  \
    static inline BITS NAME(const BITS *values)                                                                        \
    {                                                                                                                  \
        SIGNED high = (SIGNED)values[0];                                                                               \
        BITS low = values[0];                                                                                          \
        for (int i = 0; i < BLOCK; ++i)                                                                                \
            high = (SIGNED)values[i] > high ? (SIGNED)values[i] : high;                                                \
        for (int i = 0; i < BLOCK; ++i)                                                                                \
            low = values[i] > low ? values[i] : low;                                                                   \
        if ((BITS)high != (low & MAGNITUDE))                                                                           \
            return (BITS)high > (low & MAGNITUDE) ? (BITS)high : low;                                                  \
        int first = 0;                                                                                                 \
        while ((values[first] & MAGNITUDE) != (BITS)high)                                                              \
            ++first;                                                                                                   \
        return values[first];                                                                                          \
    }

DEFINE_LARGEST(largest_16, uint16_t, int16_t, 0x7FFFu)
DEFINE_LARGEST(largest_32, uint32_t, int32_t, 0x7FFFFFFFu)

static inline int32_t quant(float value, float inverse)
{
    int32_t nearest = (int32_t)(value * inverse + 8.5f);
    return nearest < 0 ? 0 : nearest > 15 ? 15 : nearest;
}

#define DEFINE_QUANTIZE(NAME, BITS, LARGEST, EXACT)                                                                    \
    int NAME(const BITS *values, int64_t blocks, uint8_t *out)                                                         \
    {                                                                                                                  \
        for (; blocks > 0; blocks -= MANY, values += MANY * BLOCK, out += MANY * BLOCK_NBYTES) {                       \
            int count = blocks < MANY ? (int)blocks : MANY;                                                            \
            float largest[MANY], inverse[MANY];                                                                        \
            uint16_t scales[MANY];                                                                                     \
            uint32_t refused = 0;                                                                                      \
            for (int b = 0; b < count; ++b)                                                                            \
                largest[b] = EXACT(LARGEST(values + b * BLOCK));                                                       \
            for (int b = 0; b < count; ++b) {                                                                          \
                refused |= (bits_of(largest[b]) & 0x7FFFFFFFu) >= TOO_LARGE;                                           \
                scales[b] = as_half(largest[b] / -8);                                                                  \
            }                                                                                                          \
            if (refused)                                                                                               \
                return 1;                                                                                              \
            for (int b = 0; b < count; ++b) {                                                                          \
                float stored = of_half(scales[b]);                                                                     \
                inverse[b] = stored == 0 ? 0 : 1 / stored;                                                             \
            }                                                                                                          \
            for (int b = 0; b < count; ++b) {                                                                          \
                const BITS *block = values + b * BLOCK;                                                                \
                uint8_t *packed = out + b * BLOCK_NBYTES;                                                              \
                packed[0] = (uint8_t)scales[b];                                                                        \
                packed[1] = (uint8_t)(scales[b] >> 8);                                                                 \
                for (int i = 0; i < HALF; ++i)                                                                         \
                    packed[2 + i] = (uint8_t)(quant(EXACT(block[i]), inverse[b]) |                                     \
                                              quant(EXACT(block[HALF + i]), inverse[b]) << 4);                         \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_QUANTIZE(quantize_bf16, uint16_t, largest_16, of_bf16)
DEFINE_QUANTIZE(quantize_f16, uint16_t, largest_16, of_half)
DEFINE_QUANTIZE(quantize_f32, uint32_t, largest_32, number)
