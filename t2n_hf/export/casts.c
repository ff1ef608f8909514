/*
 * Floats in another type. Compiled by tensor/quant/native.py; the numbers are those of torch's casts, bit for bit.
 *
 * Each function casts count values, of which the bits are given, to out, and returns 0; or 1, and leaves anything in
 * out, when one of them is NaN, or is beyond the type that is asked for.
 */
#include <stdint.h>
#include <string.h>

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
static inline uint16_t as_half(uint32_t bits)
{
    uint32_t body = bits & 0x7FFFFFFFu;
    uint32_t normal = (body - (112u << 23) + 0xFFFu + (body >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(number(body) + 0.5f) - bits_of(0.5f);
    return (uint16_t)((bits >> 16 & 0x8000u) | (body < 0x38800000u ? subnormal : normal));
}

static inline uint32_t as_float(uint32_t bits)
{
    return bits;
}

static inline uint32_t of_bf16(uint16_t value)
{
    return (uint32_t)value << 16;
}

static inline uint32_t of_f32(uint32_t value)
{
    return value;
}

/* FIRST_REFUSED: the bits, in f32, of the least magnitude that is refused, as is all that is larger, and NaN. */
#define DEFINE_CAST(NAME, HELD, BITS, WANTED, CAST, FIRST_REFUSED)                                                     \
    int NAME(const HELD *values, int64_t count, WANTED *out)                                                           \
    {                                                                                                                  \
        uint32_t largest = 0;                                                                                          \
        for (int64_t i = 0; i < count; ++i) {                                                                          \
            uint32_t bits = BITS(values[i]), body = bits & 0x7FFFFFFFu;                                                \
            largest = body > largest ? body : largest;                                                                 \
            out[i] = CAST(bits);                                                                                       \
        }                                                                                                              \
        return largest >= FIRST_REFUSED;                                                                               \
    }

DEFINE_CAST(bf16_to_f16, uint16_t, of_bf16, uint16_t, as_half, 0x477FF000u)
DEFINE_CAST(f32_to_f16, uint32_t, of_f32, uint16_t, as_half, 0x477FF000u)
DEFINE_CAST(bf16_to_f32, uint16_t, of_bf16, uint32_t, as_float, 0x7F800001u)
