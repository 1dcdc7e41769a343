/* The passes over rows, for one type of elements: included once for each, with

   ELEMENT            the type
   NAMED(function)    a function's name for it
   READ(x)            an element as a float
   WRITTEN(x)         a float as an element */

#define SUMMED_AT_ONCE 256

/* out = x * factor * weight with factor = 1 / rms(x), kept per row. */
void NAMED(rms_norm)(const ELEMENT *x, const ELEMENT *weight, float epsilon, ELEMENT *out, float *factors, int64_t rows,
                     int64_t size, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *from = x + row * size;
        ELEMENT *to = out + row * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares = fmaf(READ(from[i]), READ(from[i]), squares);
        float factor = factors[row] = 1.0f / sqrtf(squares / (float)size + epsilon);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = WRITTEN(READ(from[i]) * factor * READ(weight[i]));
    }
}

/* Gradients of x, and of the weight as `parts` sums over equal parts of the rows: of_weight [parts, size]. */
void NAMED(rms_norm_backward)(const ELEMENT *of_out, const ELEMENT *x, const ELEMENT *weight, const float *factors,
                              ELEMENT *of_x, float *of_weight, int64_t rows, int64_t size, int64_t parts, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t part = 0; part < parts; part++) {
        float *sums = of_weight + part * size;
        memset(sums, 0, size * sizeof(float));
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
            const ELEMENT *from = x + row * size, *of = of_out + row * size;
            ELEMENT *to = of_x + row * size;
            float factor = factors[row], dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < size; i++) {
                dot = fmaf(READ(of[i]) * READ(weight[i]), READ(from[i]), dot);
                sums[i] = fmaf(READ(of[i]) * READ(from[i]), factor, sums[i]);
            }
            float share = dot * factor * factor * factor / (float)size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++)
                to[i] = WRITTEN(fmaf(READ(of[i]) * READ(weight[i]), factor, -READ(from[i]) * share));
        }
    }
}

/* out = silu(gate) * up. */
void NAMED(silu_mul)(const ELEMENT *gate, const ELEMENT *up, ELEMENT *out, int64_t size, int threads)
{
#pragma omp parallel for simd num_threads(threads)
    for (int64_t i = 0; i < size; i++) {
        float x = READ(gate[i]);
        /* Beyond 80 the sigmoid is 1 (or 0) in float32. */
        float bounded = -x > 80.0f ? 80.0f : -x;
        out[i] = WRITTEN(x / (1.0f + exponential(bounded)) * READ(up[i]));
    }
}

void NAMED(silu_mul_backward)(const ELEMENT *of_out, const ELEMENT *gate, const ELEMENT *up, ELEMENT *of_gate,
                              ELEMENT *of_up, int64_t size, int threads)
{
#pragma omp parallel for simd num_threads(threads)
    for (int64_t i = 0; i < size; i++) {
        float x = READ(gate[i]), of = READ(of_out[i]);
        float bounded = -x > 80.0f ? 80.0f : -x;
        float sigmoid = 1.0f / (1.0f + exponential(bounded));
        of_up[i] = WRITTEN(of * x * sigmoid);
        of_gate[i] = WRITTEN(of * READ(up[i]) * sigmoid * (1.0f + x * (1.0f - sigmoid)));
    }
}

/* Turn heads by their positions: x [rows, heads, dims], cosines and sines [rows, dims] to out [rows, heads, dims]; halves
   of a head belong together. `is_gradient`: x is the gradient by the result, and out that by what was turned. */
void NAMED(rotate_halves)(const ELEMENT *x, const ELEMENT *cosines, const ELEMENT *sines, int is_gradient, ELEMENT *out,
                          int64_t rows, int64_t heads, int64_t dims, int threads)
{
    int64_t half = dims / 2;
    float sign = is_gradient ? -1.0f : 1.0f;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *c = cosines + row * dims, *s = sines + row * dims;
        const ELEMENT *of_second = is_gradient ? s + half : s, *of_first = is_gradient ? s : s + half;
        for (int64_t head = 0; head < heads; head++) {
            const ELEMENT *from = x + (row * heads + head) * dims;
            ELEMENT *to = out + (row * heads + head) * dims;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float first = READ(from[i]), second = READ(from[half + i]);
                to[i] = WRITTEN(first * READ(c[i]) - sign * second * READ(of_second[i]));
                to[half + i] = WRITTEN(second * READ(c[half + i]) + sign * first * READ(of_first[i]));
            }
        }
    }
}

/* out[r] = x[index[r]], and 0 where the index is negative. */
void NAMED(take_rows)(const ELEMENT *x, const int64_t *index, ELEMENT *out, int64_t rows, int64_t size, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        if (index[row] < 0)
            memset(out + row * size, 0, size * sizeof(ELEMENT));
        else
            memcpy(out + row * size, x + index[row] * size, size * sizeof(ELEMENT));
    }
}

/* out[r] = the sum of x[sources[starts[r]]] to x[sources[starts[r + 1] - 1]], rounded once. */
void NAMED(sum_rows)(const ELEMENT *x, const int64_t *sources, const int64_t *starts, ELEMENT *out, int64_t rows,
                     int64_t size, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t start = 0; start < size; start += SUMMED_AT_ONCE) {
            int64_t count = size - start < SUMMED_AT_ONCE ? size - start : SUMMED_AT_ONCE;
            float sums[SUMMED_AT_ONCE] = {0};
            for (int64_t at = starts[row]; at < starts[row + 1]; at++) {
                const ELEMENT *from = x + sources[at] * size + start;
#pragma omp simd
                for (int64_t i = 0; i < count; i++) sums[i] += READ(from[i]);
            }
            ELEMENT *to = out + row * size + start;
#pragma omp simd
            for (int64_t i = 0; i < count; i++) to[i] = WRITTEN(sums[i]);
        }
    }
}

#undef SUMMED_AT_ONCE
