/* What one decode step does besides its matrix products, in float32 on one thread.

   Rows are independent of each other, and each is computed in the same order whatever else is in the batch. Sums are
   vectorised by `omp simd` alone: nothing here relies on -ffast-math, so what is not a number stays visible. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add, torch's own operators are faster"
#endif

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 64

typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t indices __attribute__((vector_size(32)));
#define LANES 8
#define AT_ONCE 4

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

/* out = x / rms(x) * weight. */
INLINE void normalize(const float *x, const float *weight, float epsilon, float *out, int64_t size)
{
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
    float factor = 1.0f / sqrtf(squares / (float)size + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

/* out[r] = table[ids[r]]. */
void embed(const float *table, const int64_t *ids, float *out, int64_t rows, int64_t size)
{
    for (int64_t row = 0; row < rows; row++) memcpy(out + row * size, table + ids[row] * size, size * sizeof(float));
}

void rms_norm(const float *x, const float *weight, float epsilon, float *out, int64_t rows, int64_t size)
{
    for (int64_t row = 0; row < rows; row++) normalize(x + row * size, weight, epsilon, out + row * size, size);
}

/* out[r, i] = silu(x[r, i]) * x[r, size + i]. */
void silu_mul(const float *x, float *out, int64_t rows, int64_t size)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * size, *up = gate + size;
        float *to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            /* Beyond 80 the sigmoid is 1 (or 0) in float32. */
            float bounded = -gate[i] > 80.0f ? 80.0f : -gate[i];
            to[i] = gate[i] / (1.0f + exponential(bounded)) * up[i];
        }
    }
}

/* The other of each pair. */
INLINE vec swap_pairs(vec x)
{
#if defined(__clang__)
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    return __builtin_shuffle(x, (indices){1, 0, 3, 2, 5, 4, 7, 6});
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
            *(vec *)(out + i) = pairs * *(const vec *)(rotation + i)
                                + swap_pairs(pairs) * *(const vec *)(rotation + dims + i);
        }
    } else {
        for (int64_t i = 0; i < dims; i++) out[i] = x[i] * rotation[i] + x[i ^ 1] * rotation[dims + i];
    }
}

/* Sums of neighbours, those of x first. */
INLINE vec sum_pairs(vec x, vec y)
{
#if defined(__clang__)
    return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    return __builtin_shuffle(x, y, (indices){0, 2, 4, 6, 8, 10, 12, 14}) + __builtin_shuffle(x, y, (indices){1, 3, 5, 7, 9, 11, 13, 15});
#endif
}

/* Products of a query with the keys of eight positions: all eight are read, whether they are in use or not. */
INLINE vec scores_of_eight(const float *query, const float *keys, int64_t dims)
{
    vec sums[LANES];
    for (int t = 0; t < LANES; t++) {
        const float *key = keys + t * dims;
        sums[t] = *(const vec *)query * *(const vec *)key;
        for (int64_t i = LANES; i < dims; i += LANES) sums[t] += *(const vec *)(query + i) * *(const vec *)(key + i);
    }
    vec low = sum_pairs(sum_pairs(sums[0], sums[1]), sum_pairs(sums[2], sums[3]));
    vec high = sum_pairs(sum_pairs(sums[4], sums[5]), sum_pairs(sums[6], sums[7]));
    return sum_pairs(low, high);
}

/* One query against the keys and values of `num` positions; the cache holds a multiple of eight. */
INLINE void attend_one(const float *query, const float *keys, const float *values, float scale, float *scores, float *out,
                       int64_t num, int64_t dims)
{
    float most = -INFINITY, total = 0;
    if (dims % LANES == 0) {
        for (int64_t t = 0; t < num; t += LANES) *(vec *)(scores + t) = scores_of_eight(query, keys + t * dims, dims);
    } else {
        for (int64_t t = 0; t < num; t++) {
            scores[t] = 0;
            for (int64_t i = 0; i < dims; i++) scores[t] += query[i] * keys[t * dims + i];
        }
    }
    /* Whole vectors: what lies behind the last position gets a weight of 0. */
    int64_t padded = (num + LANES - 1) / LANES * LANES;
    for (int64_t t = num; t < padded; t++) scores[t] = -INFINITY;
    float mosts[LANES], totals[LANES] = {0};
    for (int each = 0; each < LANES; each++) mosts[each] = scores[each];
    for (int64_t t = LANES; t < padded; t += LANES)
        for (int each = 0; each < LANES; each++)
            mosts[each] = scores[t + each] > mosts[each] ? scores[t + each] : mosts[each];
    for (int each = 0; each < LANES; each++) most = mosts[each] > most ? mosts[each] : most;
    for (int64_t t = 0; t < padded; t += LANES)
#pragma omp simd
        for (int each = 0; each < LANES; each++) {
            scores[t + each] = exponential((scores[t + each] - most) * scale);
            totals[each] += scores[t + each];
        }
    for (int each = 0; each < LANES; each++) total += totals[each];
    if (dims % LANES == 0) {
        for (int64_t i = 0; i < dims; i += LANES) {
            const float *value = values + i;
            vec sums[AT_ONCE] = {{0}};
            int64_t t = 0;
            for (; t + AT_ONCE <= num; t += AT_ONCE)
                for (int each = 0; each < AT_ONCE; each++)
                    sums[each] += scores[t + each] * *(const vec *)(value + (t + each) * dims);
            for (; t < num; t++) sums[0] += scores[t] * *(const vec *)(value + t * dims);
            *(vec *)(out + i) = ((sums[0] + sums[1]) + (sums[2] + sums[3])) / total;
        }
    } else {
        for (int64_t i = 0; i < dims; i++) {
            float sum = 0;
            for (int64_t t = 0; t < num; t++) sum += scores[t] * values[t * dims + i];
            out[i] = sum / total;
        }
    }
}

struct sizes {
    int64_t rows, heads, kv_heads, dims, capacity;
};

INLINE void attend_rows(const float *qkv, const float *norms, float epsilon, const float *rotations,
                        const int64_t *lengths, float *keys, float *values, float *scores, float *out, struct sizes s,
                        int64_t dims)
{
    int64_t queries_of_one = s.heads / s.kv_heads;
    float scale = 1.0f / sqrtf((float)dims), query[dims];
    for (int64_t row = 0; row < s.rows; row++) {
        int64_t at = lengths[row];
        const float *fused = qkv + row * (s.heads + 2 * s.kv_heads) * dims, *rotation = rotations + at * 2 * dims;
        for (int64_t head = 0; head < s.kv_heads; head++) {
            int64_t start = (row * s.kv_heads + head) * s.capacity * dims, place = s.heads + head;
            float *mine = keys + start, *seen = values + start;
            rotate(fused + place * dims, norms ? norms + place * dims : 0, epsilon, rotation, mine + at * dims, dims);
            memcpy(seen + at * dims, fused + (place + s.kv_heads) * dims, dims * sizeof(float));
            for (int64_t each = head * queries_of_one; each < (head + 1) * queries_of_one; each++) {
                rotate(fused + each * dims, norms ? norms + each * dims : 0, epsilon, rotation, query, dims);
                attend_one(query, mine, seen, scale, scores, out + (row * s.heads + each) * dims, at + 1, dims);
            }
        }
    }
}

/* Append each row's key and value to its cache, and let its queries see all that is there.

   qkv [rows, heads + 2 kv_heads, dims] before norm and rotation; norms [heads + kv_heads, dims] or NULL; rotations
   [positions, 2, dims]; lengths [rows] positions cached before; keys and values
   [rows, kv_heads, capacity, dims]; scores [capacity] scratch; out [rows, heads, dims]. */
void attend(const float *qkv, const float *norms, float epsilon, const float *rotations, const int64_t *lengths,
            float *keys, float *values, float *scores, float *out, int64_t rows, int64_t heads, int64_t kv_heads,
            int64_t dims, int64_t capacity)
{
    struct sizes s = {rows, heads, kv_heads, dims, capacity};
#define WITH(D) attend_rows(qkv, norms, epsilon, rotations, lengths, keys, values, scores, out, s, D)
    switch (dims) {
    case 16: WITH(16); break;
    case 32: WITH(32); break;
    case 64: WITH(64); break;
    case 128: WITH(128); break;
    default: WITH(dims);
    }
}

/* Split the projections of whole sequences into heads, normalised and turned: qkv [num, tokens, heads + 2 kv_heads, dims]
   to queries [num, heads, tokens, dims], keys and values [num, kv_heads, tokens, dims]. */
void split_heads(const float *qkv, const float *norms, float epsilon, const float *rotations, float *queries,
                 float *keys, float *values, int64_t num, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dims)
{
    for (int64_t n = 0; n < num; n++)
        for (int64_t t = 0; t < tokens; t++) {
            const float *fused = qkv + (n * tokens + t) * (heads + 2 * kv_heads) * dims;
            for (int64_t head = 0; head < heads + 2 * kv_heads; head++, fused += dims) {
                int64_t key = head - heads, value = key - kv_heads;
                float *to = key < 0     ? queries + ((n * heads + head) * tokens + t) * dims
                            : value < 0 ? keys + ((n * kv_heads + key) * tokens + t) * dims
                                        : values + ((n * kv_heads + value) * tokens + t) * dims;
                if (value >= 0)
                    memcpy(to, fused, dims * sizeof(float));
                else
                    rotate(fused, norms ? norms + head * dims : 0, epsilon, rotations + t * 2 * dims, to, dims);
            }
        }
}

/* Copy sequences new [num, kv_heads, tokens * dims] to the beginnings of rows of a cache [rows, kv_heads, room]:
   row rows[i] gets sequence origins[i]. */
void write_rows(const float *new, float *cache, const int64_t *rows, const int64_t *origins, int64_t num, int64_t kv_heads,
                int64_t size, int64_t room)
{
    for (int64_t i = 0; i < num; i++)
        for (int64_t head = 0; head < kv_heads; head++)
            memcpy(cache + (rows[i] * kv_heads + head) * room, new + (origins[i] * kv_heads + head) * size,
                   size * sizeof(float));
}

/* Sample one token per row of logits [rows, size]: the first whose cumulative probability exceeds the row's draw.

   temperatures [rows] or NULL; scratch [size]; sums [blocks]. A row that has a logit that is no number gets a log-probability that is
   none either. */
void sample(const float *logits, const double *draws, const float *temperatures, float *scratch, double *sums, int64_t *tokens,
            float *log_probs, int64_t rows, int64_t size)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * size;
        float factor = 1.0f / (temperatures ? temperatures[row] : 1.0f), most = -INFINITY;
        double total = 0, before = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < size; i++) most = x[i] > most ? x[i] : most;
        for (int64_t start = 0; start < size; start += BLOCK) {
            int64_t end = start + BLOCK < size ? start + BLOCK : size;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < end; i++) {
                scratch[i] = exponential((x[i] - most) * factor);
                sum += scratch[i];
            }
            sums[start / BLOCK] = (double)sum;
            total += (double)sum;
        }
        double threshold = draws[row] * total;
        int64_t token = total == total ? 0 : size; /* Past the end: it has no total. */
        while (token + BLOCK < size && before + sums[token / BLOCK] <= threshold) {
            before += sums[token / BLOCK];
            token += BLOCK;
        }
        for (; token < size; token++) {
            before += (double)scratch[token];
            if (before > threshold) break;
        }
        if (token == size) token--;
        /* Sums in another order differ in the last bits: never end at a token that cannot be. */
        while (token > 0 && scratch[token] == 0) token--;
        tokens[row] = token;
        log_probs[row] = (float)((double)((x[token] - most) * factor) - log(total));
    }
}
