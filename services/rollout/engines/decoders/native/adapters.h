/* Adapters of rows: beside a product that all rows share, each row may have low-rank matrices of its own.

   A row's A and B are read for it alone, in the same order whatever is beside it: its bits do not depend on the batch. */

#ifndef ADAPTERS_H
#define ADAPTERS_H

#include "products.h"

/* The places of a layer that can have one, in the order in which a layer's adapters lie in memory. */
enum place { QUERY, KEY, VALUE, OUTPUT, GATE_HALF, UP_HALF, DOWN, PLACES };

/* What is added: high^T (low x), to `outputs` values from `first` on. low [rank, depth], high [rank, outputs]; rank 0:
   nothing. */
struct adapter {
    const float *low, *high;
    int64_t rank, first, outputs;
};

/* Of all rows, and what is worked with.

   of_row [rows of the cache]: adapters of the first layer, those of others behind them; NULL: none. of [positions],
   plus [positions], gates [positions, 2 * intermediate]: to work with. */
struct adapters {
    const struct adapter *const *of_row;
    const struct adapter **of;
    const float **plus;
    float *gates;
};

#define AT_ONCE 4 /* rows of A, and of B, that are read side by side: each sum alone would wait for itself */

/* Multiply x [depth] with `count` rows of A, known when it is compiled. */
INLINE void lower(const float *low, const float *x, int64_t depth, float *factors, const int count)
{
    vec left[AT_ONCE], right[AT_ONCE];
    int64_t i = 0;
    for (int k = 0; k < count; k++) left[k] = right[k] = (vec){0};
    for (; i + PANEL <= depth; i += PANEL) {
        vec first = *(const vec *)(x + i), second = *(const vec *)(x + i + LANES);
#pragma GCC unroll 4
        for (int k = 0; k < count; k++) {
            left[k] = fused(*(const vec *)(low + k * depth + i), first, left[k]);
            right[k] = fused(*(const vec *)(low + k * depth + i + LANES), second, right[k]);
        }
    }
    for (int k = 0; k < count; k++) {
        factors[k] = sum_of(left[k] + right[k])[0];
        for (int64_t j = i; j < depth; j++) factors[k] = fmaf(low[k * depth + j], x[j], factors[k]);
    }
}

/* Add `count` rows of B, times their factors, to out [outputs]. */
INLINE void raise(const float *high, const float *factors, int64_t outputs, float *out, const int count)
{
    int64_t i = 0;
    for (; i + LANES <= outputs; i += LANES) {
        vec sum = *(vec *)(out + i);
#pragma GCC unroll 4
        for (int k = 0; k < count; k++) sum = fused(all_of(factors[k]), *(const vec *)(high + k * outputs + i), sum);
        *(vec *)(out + i) = sum;
    }
    for (; i < outputs; i++)
        for (int k = 0; k < count; k++) out[i] = fmaf(factors[k], high[k * outputs + i], out[i]);
}

/* Add what the adapter adds of one row x [depth] to out. */
static void adapt_row(const struct adapter *a, const float *x, int64_t depth, float *out)
{
    float factors[AT_ONCE];
    int64_t k = 0;
    out += a->first;
    for (; k + AT_ONCE <= a->rank; k += AT_ONCE) {
        lower(a->low + k * depth, x, depth, factors, AT_ONCE);
        raise(a->high + k * a->outputs, factors, a->outputs, out, AT_ONCE);
    }
    for (; k < a->rank; k++) {
        lower(a->low + k * depth, x, depth, factors, 1);
        raise(a->high + k * a->outputs, factors, a->outputs, out, 1);
    }
}

/* Add to rows of out what `count` places of a layer, from `first` on, add of rows of x. of [rows]: each one's adapters of
   the first layer. */
static void adapt(const struct adapter *const *of, int64_t first, int64_t count, const float *x, int64_t depth, float *out,
                  int64_t stride, int64_t rows, int64_t threads)
{
    int64_t work = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t place = first; of[row] && place < first + count; place++)
            work += of[row][place].rank * (depth + of[row][place].outputs);
    int64_t parts = work >= WORTH_THREADS ? threads : 1;
#pragma omp parallel for num_threads((int)parts) schedule(static, 1) if (parts > 1)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
            for (int64_t place = first; of[row] && place < first + count; place++)
                adapt_row(of[row] + place, x + row * depth, depth, out + row * stride);
}

/* Compute what goes to the gates and to what they gate: sets plus[row], NULL where a row has no adapter of theirs. */
static void adapt_gates(const struct adapters *a, int64_t layer, const float *x, int64_t depth, int64_t intermediate, int64_t rows,
                        int64_t threads)
{
    int64_t first = layer * PLACES + GATE_HALF;
    for (int64_t row = 0; row < rows; row++) {
        int has = a->of[row] && (a->of[row][first].rank || a->of[row][first + 1].rank);
        float *gates = a->gates + row * 2 * intermediate;
        a->plus[row] = has ? gates : 0;
        if (has) memset(gates, 0, 2 * intermediate * sizeof(float));
    }
    adapt((const struct adapter *const *)a->of, first, 2, x, depth, a->gates, 2 * intermediate, rows, threads);
}

/* Keep the adapters of rows that are wanted, as `keep_wanted` keeps the rows. */
static void keep_adapters(const struct adapter **of, const int64_t *wanted, int64_t rows)
{
    int64_t kept = 0;
    for (int64_t row = 0; row < rows; row++)
        if (wanted[row]) of[kept++] = of[row];
}

#endif
