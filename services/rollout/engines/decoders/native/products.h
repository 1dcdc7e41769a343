/* Products of a few rows with a matrix: out [rows, outputs] = x [rows, depth] * weight [outputs, depth] transposed.

   A matrix is packed once: panels of PANEL outputs, each [depth, PANEL], zeros where there is no output. A tile of rows
   and one panel is summed in registers, in the order of depth whatever the number of rows: a row's result does not depend
   on its neighbours, to the last bit. Weights are float32 or bfloat16, and are multiplied and summed in float32 either way. */

#ifndef PRODUCTS_H
#define PRODUCTS_H

#include "vectors.h"

#define PANEL (2 * LANES)
#if defined(__AVX512F__)
#define TILE 12 /* 24 of 32 registers hold sums */
#else
#define TILE 6
#endif
#define PACKED_AT_ONCE 64
#define AHEAD 2048 /* bytes that are fetched before they are needed */
#define WORTH_THREADS (1 << 24) /* multiplications that gain more by a second thread than it costs to wake it */

enum ending {
    STORE, /* out = product + bias */
    ADD,   /* out += product */
    GATE   /* out = silu(first half of the outputs) * second half, of the product and what is to be added to it */
};

/* Pack a weight [outputs, depth] of elements of some bytes, whose rows may lie anywhere. Gated: a panel has LANES outputs of
   the first half and the same of the second. */
INLINE void pack_elements(const void *const *rows, void *packed, int64_t outputs, int64_t depth, int64_t gated, const int bytes)
{
    int64_t each = gated ? outputs / 2 : outputs, width = gated ? LANES : PANEL;
    for (int64_t first = 0; first < each; first += width, packed = (char *)packed + depth * PANEL * bytes)
        for (int64_t start = 0; start < depth; start += PACKED_AT_ONCE) {
            int64_t end = start + PACKED_AT_ONCE < depth ? start + PACKED_AT_ONCE : depth;
            for (int64_t column = 0; column < PANEL; column++) {
                int64_t output = first + column % width;
                const void *row = output < each ? rows[output + column / width * each] : 0;
                for (int64_t k = start; k < end; k++) {
                    int64_t at = k * PANEL + column;
                    if (bytes == 2)
                        ((uint16_t *)packed)[at] = row ? ((const uint16_t *)row)[k] : 0;
                    else
                        ((uint32_t *)packed)[at] = row ? ((const uint32_t *)row)[k] : 0;
                }
            }
        }
}

void pack(const void *const *rows, void *packed, int64_t outputs, int64_t depth, int64_t gated, int64_t is_half)
{
    if (is_half)
        pack_elements(rows, packed, outputs, depth, gated, 2);
    else
        pack_elements(rows, packed, outputs, depth, gated, 4);
}

typedef uint32_t bits __attribute__((may_alias));
typedef uint16_t half_bits __attribute__((may_alias));

/* Sum the words of each output of a packed weight, as shared/weights/image/digests.py sums those of a row: two floats, or
   four of bfloat16, are a word, whose upper bits are mixed into the lower ones, times the number of its place.
   sums [panels * PANEL]. */
INLINE void sum_words(const char *packed, const uint64_t *places, uint64_t *sums, int64_t panels, int64_t depth, const int bytes)
{
    const int per_word = 8 / bytes;
    for (int64_t panel = 0; panel < panels; panel++, packed += depth * PANEL * bytes, sums += PANEL) {
        uint64_t totals[PANEL] = {0};
        for (int64_t k = 0; k < depth; k += per_word) {
            uint64_t words[PANEL] = {0}, place = places[k / per_word];
            for (int part = 0; part < per_word && k + part < depth; part++) {
                const char *row = packed + (k + part) * PANEL * bytes;
#pragma omp simd
                for (int column = 0; column < PANEL; column++)
                    words[column] |= (bytes == 2 ? (uint64_t)((const half_bits *)row)[column] : ((const bits *)row)[column])
                                     << (8 * bytes * part);
            }
#pragma omp simd
            for (int column = 0; column < PANEL; column++) totals[column] += (words[column] ^ words[column] >> 29) * place;
        }
        memcpy(sums, totals, sizeof totals);
    }
}

void row_sums(const void *packed, const uint64_t *places, uint64_t *sums, int64_t panels, int64_t depth, int64_t is_half)
{
    if (is_half)
        sum_words(packed, places, sums, panels, depth, 2);
    else
        sum_words(packed, places, sums, panels, depth, 4);
}

/* One panel for some rows, known when it is compiled: sums [rows, 2]. */
INLINE void tile(const float *x, int64_t stride, const char *panel, int64_t depth, vec *sums, const int rows, const int bytes)
{
    vec left[TILE], right[TILE];
    for (int row = 0; row < rows; row++) left[row] = right[row] = (vec){0};
    for (int64_t k = 0; k < depth; k++, panel += PANEL * bytes) {
        const char *middle = panel + LANES * bytes;
        vec first = bytes == 2 ? all_widened((const bfloat16 *)panel) : *(const vec *)panel;
        vec second = bytes == 2 ? all_widened((const bfloat16 *)middle) : *(const vec *)middle;
        __builtin_prefetch(panel + AHEAD);
        if (bytes == 4) __builtin_prefetch(middle + AHEAD);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            vec factor = all_of(x[row * stride + k]);
            left[row] = fused(factor, first, left[row]);
            right[row] = fused(factor, second, right[row]);
        }
    }
    for (int row = 0; row < rows; row++) {
        sums[2 * row] = left[row];
        sums[2 * row + 1] = right[row];
    }
}

INLINE void tile_of(const float *x, int64_t stride, const char *panel, int64_t depth, vec *sums, int rows, const int bytes)
{
#define ROWS(N) case N: tile(x, stride, panel, depth, sums, N, bytes); break
    switch (rows) {
    ROWS(1); ROWS(2); ROWS(3); ROWS(4); ROWS(5); ROWS(6);
#if TILE == 12
    ROWS(7); ROWS(8); ROWS(9); ROWS(10); ROWS(11); ROWS(12);
#endif
    }
}

static void tile_of_floats(const float *x, int64_t stride, const char *panel, int64_t depth, vec *sums, int rows)
{
    tile_of(x, stride, panel, depth, sums, rows, 4);
}

static void tile_of_halves(const float *x, int64_t stride, const char *panel, int64_t depth, vec *sums, int rows)
{
    tile_of(x, stride, panel, depth, sums, rows, 2);
}

/* Put the sums of one row where they belong: `num` outputs, or pairs of them, are left. */
INLINE void end_row(const float *sums, const float *bias, float *out, int64_t num, enum ending ending)
{
    float gated[LANES];
    if (ending == GATE) {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            /* Beyond 80 the sigmoid is 1 (or 0) in float32. */
            float bounded = -sums[i] > 80.0f ? 80.0f : -sums[i];
            gated[i] = sums[i] / (1.0f + exponential(bounded)) * sums[LANES + i];
        }
        memcpy(out, gated, (num < LANES ? num : LANES) * sizeof(float));
    } else if (num >= PANEL) {
#pragma omp simd
        for (int i = 0; i < PANEL; i++) out[i] = sums[i] + (ending == ADD ? out[i] : bias ? bias[i] : 0);
    } else {
        for (int64_t i = 0; i < num; i++) out[i] = sums[i] + (ending == ADD ? out[i] : bias ? bias[i] : 0);
    }
}

/* A product: `outputs` counts pairs where they are gated; then plus[row], where it is not NULL, is added to the two halves
   of the row's outputs before. is_half: the weight is bfloat16. */
struct product {
    const float *x;
    const void *packed;
    const float *bias;
    float *out;
    int64_t stride, out_stride, rows, depth, outputs;
    enum ending ending;
    const float *const *plus;
    int64_t is_half;
};

/* Add to the sums of a panel of pairs, of which `num` are left. */
INLINE void add_pairs(float *sums, const float *plus, int64_t num, int64_t outputs)
{
    int64_t count = num < LANES ? num : LANES;
    for (int64_t i = 0; i < count; i++) {
        sums[i] += plus[i];
        sums[LANES + i] += plus[outputs + i];
    }
}

/* Some panels of a product, whose ending is known when it is compiled. */
INLINE void panels(const struct product *p, int64_t begin, int64_t end, const enum ending ending)
{
    int64_t width = ending == GATE ? LANES : PANEL;
    int64_t bytes = p->depth * PANEL * (p->is_half ? sizeof(bfloat16) : sizeof(float));
    vec sums[2 * TILE];
    for (int64_t panel = begin; panel < end; panel++) {
        const char *packed = (const char *)p->packed + panel * bytes;
        int64_t first = panel * width;
        for (int64_t row = 0; row < p->rows; row += TILE) {
            int num = p->rows - row < TILE ? (int)(p->rows - row) : TILE;
            (p->is_half ? tile_of_halves : tile_of_floats)(p->x + row * p->stride, p->stride, packed, p->depth, sums, num);
            for (int each = 0; each < num; each++) {
                if (ending == GATE && p->plus && p->plus[row + each])
                    add_pairs((float *)(sums + 2 * each), p->plus[row + each] + first, p->outputs - first, p->outputs);
                end_row((const float *)(sums + 2 * each), p->bias ? p->bias + first : 0,
                        p->out + (row + each) * p->out_stride + first, p->outputs - first, ending);
            }
        }
    }
}

static void some_panels(const struct product *p, int64_t begin, int64_t end)
{
    switch (p->ending) {
    case STORE: panels(p, begin, end, STORE); break;
    case ADD: panels(p, begin, end, ADD); break;
    case GATE: panels(p, begin, end, GATE); break;
    }
}

/* Whether a product is better made by several threads. One of few rows reads its weights for most of the time. */
int64_t is_worth_threads(int64_t rows, int64_t depth, int64_t outputs)
{
    return rows * depth * outputs >= WORTH_THREADS;
}

/* Multiply rows. Each thread computes some panels, in the order that one thread would: the bits do not depend on their
   number. */
static void multiply(const struct product *p, int64_t threads)
{
    int64_t width = p->ending == GATE ? LANES : PANEL, num = (p->outputs + width - 1) / width;
    int64_t parts = is_worth_threads(p->rows, p->depth, p->outputs) ? threads : 1;
#pragma omp parallel for num_threads((int)parts) schedule(static, 1) if (parts > 1)
    for (int64_t part = 0; part < parts; part++) some_panels(p, num * part / parts, num * (part + 1) / parts);
}

#endif
