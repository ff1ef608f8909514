/*
 * The CRC-32 of gzip by products without carries. Compiled by tensor/quant/native.py; the numbers are zlib's.
 *
 * Bytes are folded into four registers of 16 bytes, these into one, and that into 32 bits: V. Gopal et al., Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction, Intel 2009. Constants are powers of x modulo the
 * polynomial, their bits in gzip's order.
 */
#include <stdint.h>

#if !defined(__PCLMUL__) || !defined(__SSE4_1__)
#error "this processor has no products without carries; zlib is as fast"
#endif
#include <immintrin.h>

static inline __m128i fold(__m128i value, __m128i by, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(value, by, 0x00), high = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* nbytes is a multiple of 64 above 0; crc as zlib's function takes and gives it. */
uint32_t crc32_of_blocks(const uint8_t *bytes, int64_t nbytes, uint32_t crc)
{
    const __m128i *in = (const __m128i *)bytes;
    const __m128i far = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i near = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i last = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i halves = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = _mm_xor_si128(_mm_loadu_si128(in), _mm_cvtsi32_si128((int)~crc));
    __m128i b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    for (nbytes -= 64, in += 4; nbytes > 0; nbytes -= 64, in += 4) {
        a = fold(a, far, _mm_loadu_si128(in));
        b = fold(b, far, _mm_loadu_si128(in + 1));
        c = fold(c, far, _mm_loadu_si128(in + 2));
        d = fold(d, far, _mm_loadu_si128(in + 3));
    }
    a = fold(fold(fold(a, near, b), near, c), near, d);
    a = _mm_xor_si128(_mm_clmulepi64_si128(a, near, 0x10), _mm_srli_si128(a, 8));
    b = _mm_srli_si128(a, 4);
    a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, halves), last, 0x00), b);
    b = _mm_clmulepi64_si128(_mm_and_si128(a, halves), polynomial, 0x10);
    b = _mm_clmulepi64_si128(_mm_and_si128(b, halves), polynomial, 0x00);
    return ~(uint32_t)_mm_extract_epi32(_mm_xor_si128(a, b), 1);
}
