/* Vectors of floats, as wide as the processor's registers, and what is computed with them element by element.

   The compiler may fuse no multiplication with an addition by itself (-ffp-contract=off): it decides that anew in each
   copy of a function, so the bits would depend on which of them ran, such as that of one thread or that of several. What
   is fused says so. */

#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add, torch's own operators are faster"
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__FMA__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t indices __attribute__((vector_size(LANES * 4)));

/* The elements of x in the order of places, which are constants. */
#if defined(__clang__)
#define SHUFFLED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define SHUFFLED(x, ...) __builtin_shuffle(x, (indices){__VA_ARGS__})
#endif

/* A float's upper half: weights are kept so where half of the memory and of its bandwidth is what counts. */
typedef uint16_t bfloat16;

INLINE float widened(bfloat16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* LANES of them. */
INLINE vec all_widened(const bfloat16 *x)
{
#if LANES == 16
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
#else
    vec y;
    for (int i = 0; i < LANES; i++) y[i] = widened(x[i]);
    return y;
#endif
}

/* x everywhere. */
INLINE vec all_of(float x)
{
#if LANES == 16
    return (vec)_mm512_set1_ps(x);
#elif defined(__FMA__)
    return (vec)_mm256_set1_ps(x);
#else
    return (vec){x, x, x, x, x, x, x, x};
#endif
}

/* x * y + z, rounded once. */
INLINE vec fused(vec x, vec y, vec z)
{
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    for (int i = 0; i < LANES; i++) z[i] = fmaf(x[i], y[i], z[i]);
    return z;
#endif
}

/* Elements of one where a mask is set, and of other elsewhere. */
INLINE vec chosen(indices mask, vec one, vec other)
{
    return (vec)(((indices)one & mask) | ((indices)other & ~mask));
}

/* x where it is larger, else y: also where either is not a number. */
INLINE vec larger(vec x, vec y)
{
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return chosen(x > y, x, y);
#endif
}

/* Combine all elements of x by f, each with its partner of the other half, quarter, and so on. */
#if LANES == 16
#define REDUCED(x, f)                                                                       \
    x = f(x, SHUFFLED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));            \
    x = f(x, SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));            \
    x = f(x, SHUFFLED(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));            \
    x = f(x, SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#else
#define REDUCED(x, f)                               \
    x = f(x, SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3));  \
    x = f(x, SHUFFLED(x, 2, 3, 0, 1, 6, 7, 4, 5));  \
    x = f(x, SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6))
#endif
#define PLUS(x, y) ((x) + (y))

/* The largest element, everywhere. */
INLINE vec most_of(vec x)
{
    REDUCED(x, larger);
    return x;
}

/* The sum of the elements, everywhere. */
INLINE vec sum_of(vec x)
{
    REDUCED(x, PLUS);
    return x;
}

/* exp for x <= 88: within 2 units in the last place; 0 below -87.3 (Cephes' expf). */
INLINE float exponential(float x)
{
    float bounded = x < -87.3f ? -87.3f : x;
    float n = rintf(bounded * 1.44269504088896341f);
    float r = fmaf(n, -0.693359375f, bounded);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    float y = fmaf(p * r, r, r) + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.3f ? 0.0f : y * scale;
}

/* `exponential` of each element, except that it is 1.2e-38 below -87.3. */
INLINE vec exponentials(vec x)
{
    vec least = {0};
    vec bounded = larger(least - 87.3f, x);
    vec magic = all_of(12582912.0f); /* 1.5 * 2^23: what is added to it is a whole number */
    vec n = fused(bounded, all_of(1.44269504088896341f), magic) - magic;
    vec r = fused(n, all_of(-0.693359375f), bounded);
    r = fused(n, all_of(2.12194440e-4f), r);
    vec p = fused(r, all_of(1.9875691500e-4f), all_of(1.3981999507e-3f));
    p = fused(p, r, all_of(8.3334519073e-3f));
    p = fused(p, r, all_of(4.1665795894e-2f));
    p = fused(p, r, all_of(1.6666665459e-1f));
    p = fused(p, r, all_of(5.0000001201e-1f));
    vec y = fused(p * r, r, r) + 1.0f;
    indices bits = (__builtin_convertvector(n, indices) + 127) << 23;
    return y * (vec)bits;
}

/* out = x / rms(x) * weight. */
INLINE void normalize(const float *x, const float *weight, float epsilon, float *out, int64_t size)
{
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares = fmaf(x[i], x[i], squares);
    float factor = 1.0f / sqrtf(squares / (float)size + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

#endif
