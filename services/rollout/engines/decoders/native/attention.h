/* Attention of single positions over a cache of keys and values, float32.

   A row of a cache is [heads, capacity, dims], capacity a multiple of BLOCK. Values lie as that says. Keys lie in blocks
   of BLOCK positions, each [dims, BLOCK], so that the products of a query with all of them are sums of vectors. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "vectors.h"

#define BLOCK 16
#define PARTS (BLOCK / LANES)
#define AT_ONCE 4
#define WORTH_THREADS_TO_ATTEND (1 << 22) /* multiplications of queries with keys, which are followed by as many others */

/* The other of each pair. */
INLINE vec swap_pairs(vec x)
{
#if LANES == 16
    return SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#else
    return SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6);
#endif
}

/* Normalise a head where the model does, and turn its pairs by the rotation of its position: cosines, then sines with
   the sign that they have for each. */
INLINE void rotate(const float *x, const float *norm, float epsilon, const float *rotation, float *out, int64_t dims)
{
    float normed[dims];
    if (norm) {
        normalize(x, norm, epsilon, normed, dims);
        x = normed;
    }
    if (dims % LANES == 0) {
        for (int64_t i = 0; i < dims; i += LANES) {
            vec pairs = *(const vec *)(x + i);
            *(vec *)(out + i) = fused(pairs, *(const vec *)(rotation + i),
                                      swap_pairs(pairs) * *(const vec *)(rotation + dims + i));
        }
    } else {
        for (int64_t i = 0; i < dims; i++) out[i] = fmaf(x[i], rotation[i], x[i ^ 1] * rotation[dims + i]);
    }
}

/* Products of a query with the keys of a block; four sums, since each addition waits for the one before. */
INLINE void scores_of_block(const float *query, const float *keys, float *scores, int64_t dims)
{
    vec sums[PARTS][AT_ONCE];
    for (int part = 0; part < PARTS; part++)
        for (int each = 0; each < AT_ONCE; each++) sums[part][each] = (vec){0};
    int64_t i = 0;
    for (; i + AT_ONCE <= dims; i += AT_ONCE)
        for (int each = 0; each < AT_ONCE; each++)
            for (int part = 0; part < PARTS; part++)
                sums[part][each] = fused(all_of(query[i + each]),
                                         *(const vec *)(keys + (i + each) * BLOCK + part * LANES), sums[part][each]);
    for (; i < dims; i++)
        for (int part = 0; part < PARTS; part++)
            sums[part][0] = fused(all_of(query[i]), *(const vec *)(keys + i * BLOCK + part * LANES), sums[part][0]);
    for (int part = 0; part < PARTS; part++)
        *(vec *)(scores + part * LANES) = (sums[part][0] + sums[part][1]) + (sums[part][2] + sums[part][3]);
}

/* Turn scores into weights that are not yet divided by their sum, which is returned. Whole blocks: what lies behind the
   last position counts for nothing, whatever was there. */
INLINE float soften(float *scores, float scale, int64_t num)
{
    const int64_t last = (num - 1) / LANES * LANES, padded = (num + BLOCK - 1) / BLOCK * BLOCK;
    indices ramp;
    for (int each = 0; each < LANES; each++) ramp[each] = each;
    vec none = {0}, most, total = {0};
    none -= INFINITY;
    most = chosen(ramp < (int32_t)(num - last), *(const vec *)(scores + last), none);
    *(vec *)(scores + last) = most;
    for (int64_t t = last + LANES; t < padded; t += LANES) *(vec *)(scores + t) = none;
    for (int64_t t = 0; t < last; t += LANES) most = larger(*(const vec *)(scores + t), most);
    most = most_of(most);
    for (int64_t t = 0; t < padded; t += LANES) {
        vec weights = exponentials((*(const vec *)(scores + t) - most) * scale);
        *(vec *)(scores + t) = weights;
        total += weights;
    }
    return sum_of(total)[0];
}

/* Sum values by their weights times `share`. */
INLINE void mix(const float *weights, float share, const float *values, float *out, int64_t num, int64_t dims)
{
    if (dims % LANES == 0) {
        for (int64_t i = 0; i < dims; i += LANES) {
            const float *value = values + i;
            vec sums[AT_ONCE] = {{0}};
            int64_t t = 0;
            for (; t + AT_ONCE <= num; t += AT_ONCE)
                for (int each = 0; each < AT_ONCE; each++)
                    sums[each] = fused(all_of(weights[t + each]), *(const vec *)(value + (t + each) * dims), sums[each]);
            for (; t < num; t++) sums[0] = fused(all_of(weights[t]), *(const vec *)(value + t * dims), sums[0]);
            *(vec *)(out + i) = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * share;
        }
    } else {
        for (int64_t i = 0; i < dims; i++) {
            float sum = 0;
            for (int64_t t = 0; t < num; t++) sum = fmaf(weights[t], values[t * dims + i], sum);
            out[i] = sum * share;
        }
    }
}

/* What attention reads and writes besides its projections.

   norms [heads + kv_heads, dims] or NULL; rotations [positions, 2, dims]; keys and values [rows, kv_heads, capacity, dims];
   scores [threads, heads, capacity] scratch. */
struct attention {
    const float *norms, *rotations;
    float *keys, *values, *scores;
    float epsilon;
    int64_t heads, kv_heads, capacity, threads;
};

/* Append a position's key and value, turned, to a row. */
INLINE void remember(const float *fused, int64_t row, int64_t at, const struct attention *a, int64_t dims)
{
    const float *rotation = a->rotations + at * 2 * dims;
    float key[dims];
    for (int64_t head = 0; head < a->kv_heads; head++) {
        int64_t start = (row * a->kv_heads + head) * a->capacity * dims, place = a->heads + head;
        float *to = a->keys + start + at / BLOCK * BLOCK * dims + at % BLOCK;
        rotate(fused + place * dims, a->norms ? a->norms + place * dims : 0, a->epsilon, rotation, key, dims);
        for (int64_t i = 0; i < dims; i++) to[i * BLOCK] = key[i];
        memcpy(a->values + start + at * dims, fused + (place + a->kv_heads) * dims, dims * sizeof(float));
    }
}

/* Let the queries of a position see it and all before it: out [heads, dims]. All heads go through each part together,
   since within one of them each operation waits for the one before. */
INLINE void look_back(const float *fused, int64_t row, int64_t at, const struct attention *a, float *scores, float *out,
                      int64_t dims)
{
    int64_t queries_of_one = a->heads / a->kv_heads, num = at + 1;
    const float *rotation = a->rotations + at * 2 * dims;
    float scale = 1.0f / sqrtf((float)dims), queries[a->heads * dims], totals[a->heads];
    for (int64_t head = 0; head < a->heads; head++)
        rotate(fused + head * dims, a->norms ? a->norms + head * dims : 0, a->epsilon, rotation, queries + head * dims, dims);
    for (int64_t head = 0; head < a->heads; head++) {
        const float *keys = a->keys + (row * a->kv_heads + head / queries_of_one) * a->capacity * dims;
        for (int64_t t = 0; t < num; t += BLOCK)
            scores_of_block(queries + head * dims, keys + t * dims, scores + head * a->capacity + t, dims);
    }
    for (int64_t head = 0; head < a->heads; head++) totals[head] = soften(scores + head * a->capacity, scale, num);
    for (int64_t head = 0; head < a->heads; head++) {
        const float *values = a->values + (row * a->kv_heads + head / queries_of_one) * a->capacity * dims;
        mix(scores + head * a->capacity, 1.0f / totals[head], values, out + head * dims, num, dims);
    }
}

/* Let some positions look back; `out` is that of the first that is wanted. */
INLINE void look_back_from(const float *qkv, const int64_t *rows, const int64_t *places, const int64_t *wanted, float *out,
                           int64_t begin, int64_t end, const struct attention *a, float *scores, int64_t dims)
{
    int64_t width = (a->heads + 2 * a->kv_heads) * dims;
    for (int64_t i = begin; i < end; i++)
        if (!wanted || wanted[i]) {
            look_back(qkv + i * width, rows[i], places[i], a, scores, out, dims);
            out += a->heads * dims;
        }
}

INLINE void attend_all(const float *qkv, const int64_t *rows, const int64_t *places, const int64_t *wanted, float *out,
                       int64_t num, const struct attention *a, int64_t dims)
{
    int64_t width = (a->heads + 2 * a->kv_heads) * dims, reach = 0;
    for (int64_t i = 0; i < num; i++) {
        remember(qkv + i * width, rows[i], places[i], a, dims);
        reach += places[i] + 1;
    }
    /* Where only some are wanted, a position's place in `out` hangs on those before it. */
    int64_t parts = wanted || reach * a->heads * dims < WORTH_THREADS_TO_ATTEND ? 1 : a->threads;
#pragma omp parallel for num_threads((int)parts) schedule(static, 1) if (parts > 1)
    for (int64_t part = 0; part < parts; part++) {
        int64_t begin = num * part / parts, end = num * (part + 1) / parts;
        look_back_from(qkv, rows, places, wanted, out + begin * a->heads * dims, begin, end, a,
                       a->scores + part * a->heads * a->capacity, dims);
    }
}

/* Append positions to rows, then let each see what is there up to itself.

   qkv [num, heads + 2 kv_heads, dims] before norm and rotation; rows, places [num] where each position is in the cache;
   out [num, heads, dims], of those alone that are wanted where that is said. */
static void attend(const float *qkv, const int64_t *rows, const int64_t *places, const int64_t *wanted, float *out,
                   int64_t num, const struct attention *a, int64_t dims)
{
#define WITH(D) case D: attend_all(qkv, rows, places, wanted, out, num, a, D); break
    switch (dims) {
    WITH(16); WITH(32); WITH(64); WITH(128);
    default: attend_all(qkv, rows, places, wanted, out, num, a, dims);
    }
}

#endif
