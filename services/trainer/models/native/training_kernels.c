/* What a layer's forward and backward pass does beside its matrix products, each in one pass over its data: float32, rows
   divided among the threads of torch's own pool.

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

/* out = x * factor * weight with factor = 1 / rms(x), kept per row. */
void rms_norm(const float *x, const float *weight, float epsilon, float *out, float *factors, int64_t rows, int64_t size,
              int threads)
{
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        float *to = out + row * size, squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares = fmaf(from[i], from[i], squares);
        float factor = factors[row] = 1.0f / sqrtf(squares / (float)size + epsilon);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = from[i] * factor * weight[i];
    }
}

/* Gradients of x, and of the weight as `parts` sums over equal parts of the rows: of_weight [parts, size]. */
void rms_norm_backward(const float *of_out, const float *x, const float *weight, const float *factors, float *of_x,
                       float *of_weight, int64_t rows, int64_t size, int64_t parts, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t part = 0; part < parts; part++) {
        float *sums = of_weight + part * size;
        memset(sums, 0, size * sizeof(float));
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
            const float *from = x + row * size, *of = of_out + row * size;
            float *to = of_x + row * size, factor = factors[row], dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < size; i++) {
                dot = fmaf(of[i] * weight[i], from[i], dot);
                sums[i] = fmaf(of[i] * from[i], factor, sums[i]);
            }
            float share = dot * factor * factor * factor / (float)size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) to[i] = fmaf(of[i] * weight[i], factor, -from[i] * share);
        }
    }
}

/* out = silu(gate) * up. */
void silu_mul(const float *gate, const float *up, float *out, int64_t size, int threads)
{
#pragma omp parallel for simd num_threads(threads)
    for (int64_t i = 0; i < size; i++) {
        /* Beyond 80 the sigmoid is 1 (or 0) in float32. */
        float bounded = -gate[i] > 80.0f ? 80.0f : -gate[i];
        out[i] = gate[i] / (1.0f + exponential(bounded)) * up[i];
    }
}

void silu_mul_backward(const float *of_out, const float *gate, const float *up, float *of_gate, float *of_up,
                       int64_t size, int threads)
{
#pragma omp parallel for simd num_threads(threads)
    for (int64_t i = 0; i < size; i++) {
        float bounded = -gate[i] > 80.0f ? 80.0f : -gate[i];
        float sigmoid = 1.0f / (1.0f + exponential(bounded));
        of_up[i] = of_out[i] * gate[i] * sigmoid;
        of_gate[i] = of_out[i] * up[i] * sigmoid * (1.0f + gate[i] * (1.0f - sigmoid));
    }
}

/* Turn heads by their positions: x [rows, heads, dims], cosines and sines [rows, dims] to out [rows, heads, dims]; halves
   of a head belong together. `is_gradient`: x is the gradient by the result, and out that by what was turned. */
void rotate_halves(const float *x, const float *cosines, const float *sines, int is_gradient, float *out, int64_t rows,
                   int64_t heads, int64_t dims, int threads)
{
    int64_t half = dims / 2;
    float sign = is_gradient ? -1.0f : 1.0f;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cosines + row * dims, *s = sines + row * dims;
        const float *of_second = is_gradient ? s + half : s, *of_first = is_gradient ? s : s + half;
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + (row * heads + head) * dims;
            float *to = out + (row * heads + head) * dims;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                to[i] = from[i] * c[i] - sign * from[half + i] * of_second[i];
                to[half + i] = from[half + i] * c[half + i] + sign * from[i] * of_first[i];
            }
        }
    }
}

/* out[r] = x[index[r]], and 0 where the index is negative. */
void take_rows(const float *x, const int64_t *index, float *out, int64_t rows, int64_t size, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        if (index[row] < 0)
            memset(out + row * size, 0, size * sizeof(float));
        else
            memcpy(out + row * size, x + index[row] * size, size * sizeof(float));
    }
}

/* out[r] = the sum of x[sources[starts[r]]] to x[sources[starts[r + 1] - 1]]. */
void sum_rows(const float *x, const int64_t *sources, const int64_t *starts, float *out, int64_t rows, int64_t size,
              int threads)
{
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        float *to = out + row * size;
        if (starts[row] == starts[row + 1]) {
            memset(to, 0, size * sizeof(float));
            continue;
        }
        memcpy(to, x + sources[starts[row]] * size, size * sizeof(float));
        for (int64_t at = starts[row] + 1; at < starts[row + 1]; at++) {
            const float *from = x + sources[at] * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) to[i] += from[i];
        }
    }
}

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
