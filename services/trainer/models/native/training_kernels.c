/* What a layer's forward and backward pass does beside its matrix products, each in one pass over its data, rows divided
   among the threads of torch's own pool. Elements are float32 or bfloat16; all is computed in float32.

   Nothing relies on -ffast-math, so what is not a number stays visible. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add, torch's own operators are faster"
#endif

#define INLINE static inline __attribute__((always_inline))

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

typedef uint16_t bfloat16;

INLINE float widened(bfloat16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* To the nearest, to even where two are as near; what is not a number stays none. */
INLINE bfloat16 rounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t near = bits + 0x7fff + (bits >> 16 & 1);
    return (bfloat16)((x != x ? bits | 0x400000 : near) >> 16);
}

#define ELEMENT float
#define NAMED(function) function
#define READ(x) (x)
#define WRITTEN(x) (x)
#include "row_kernels.h"

#undef ELEMENT
#undef NAMED
#undef READ
#undef WRITTEN
#define ELEMENT bfloat16
#define NAMED(function) function##_bfloat16
#define READ(x) widened(x)
#define WRITTEN(x) rounded(x)
#include "row_kernels.h"

/* Of logits [rows, size], divided by the temperature: log-probability of each row's label, log of its normaliser, entropy,
   and sum of squared probabilities; the last two where asked for. */
void token_statistics(float *logits, const int64_t *labels, float temperature, float *log_probs, float *normalisers,
                      float *entropies, float *squares, int64_t rows, int64_t size, int threads)
{
    float factor = 1.0f / temperature;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * size;
        float most = -INFINITY, total = 0, weighted = 0, squared = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < size; i++) most = x[i] > most ? x[i] : most;
#pragma omp simd reduction(+ : total, weighted, squared)
        for (int64_t i = 0; i < size; i++) {
            float shifted = (x[i] - most) * factor, p = exponential(shifted);
            total += p;
            weighted += p * shifted;
            squared += p * p;
        }
        float of_total = logf(total);
        log_probs[row] = (x[labels[row]] - most) * factor - of_total;
        normalisers[row] = most * factor + of_total;
        if (entropies) entropies[row] = of_total - weighted / total;
        if (squares) squares[row] = squared / (total * total);
    }
}

/* Turn logits into the gradient of the loss by them, in place: from the gradients by log-probability and by entropy. */
void statistics_backward(float *logits, const int64_t *labels, float temperature, const float *normalisers,
                         const float *entropies, const float *of_log_probs, const float *of_entropies, int64_t rows,
                         int64_t size, int threads)
{
    float factor = 1.0f / temperature;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        float *x = logits + row * size, of_log_prob = of_log_probs ? of_log_probs[row] : 0.0f;
        float entropy = entropies[row], of_entropy = of_entropies ? of_entropies[row] : 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float log_prob = x[i] * factor - normalisers[row], p = exponential(log_prob < 80.0f ? log_prob : 80.0f);
            x[i] = -(of_log_prob + of_entropy * (log_prob + entropy)) * p * factor;
        }
        x[labels[row]] += of_log_prob * factor;
    }
}
