/* The forward pass of the Llama family and sampling, in float32; matrices and the embedding may be bfloat16.

   Rows are independent of each other, and each is computed in the same order whatever else is in the batch, on how many
   threads, and whether its position was computed alone or with those before it. Sums are vectorised by `omp simd` alone: nothing here relies
   on -ffast-math, so what is not a number stays visible. */

#include "adapters.h"
#include "attention.h"
#include "products.h"
#include "vectors.h"

#define SUMMED 64 /* logits that are summed in float32 before their sum joins the total */

/* Count the elements of a packed weight. */
int64_t packed_size(int64_t outputs, int64_t depth, int64_t gated)
{
    int64_t each = gated ? outputs / 2 : outputs, width = gated ? LANES : PANEL;
    return (each + width - 1) / width * PANEL * depth;
}

struct layer {
    const float *input_norm, *qkv_bias, *head_norms, *post_norm;
    const void *qkv, *output, *gate_up, *down;
};

struct model {
    const struct layer *layers;
    const void *embedding, *head;
    const float *final_norm, *rotations;
    double epsilon;
    int64_t num_layers, hidden, heads, kv_heads, dims, intermediate, vocab, is_half;
};

/* Read the embedding of a token. */
static void embed(const struct model *m, int64_t id, float *out)
{
    if (!m->is_half) {
        memcpy(out, (const float *)m->embedding + id * m->hidden, m->hidden * sizeof(float));
        return;
    }
    const bfloat16 *row = (const bfloat16 *)m->embedding + id * m->hidden;
#pragma omp simd
    for (int64_t i = 0; i < m->hidden; i++) out[i] = widened(row[i]);
}

static void rms_norm(const float *x, const float *weight, float epsilon, float *out, int64_t rows, int64_t size)
{
    for (int64_t row = 0; row < rows; row++) normalize(x + row * size, weight, epsilon, out + row * size, size);
}

/* Keep those rows that are wanted, in place; count them. */
static int64_t keep_wanted(float *x, const int64_t *wanted, int64_t rows, int64_t size)
{
    int64_t kept = 0;
    for (int64_t row = 0; row < rows; row++)
        if (wanted[row]) memmove(x + kept++ * size, x + row * size, size * sizeof(float));
    return kept;
}

/* Compute `num` positions: give the number of rows of logits. adapters: of rows of the cache; NULL: no row has any. */
static int64_t forward_part(const struct model *m, float *const *keys, float *const *values, int64_t capacity,
                            const int64_t *ids, const int64_t *rows, const int64_t *places, const int64_t *wanted,
                            int64_t num, int64_t threads, float *work, float *logits, const struct adapters *adapters)
{
    int64_t size = m->hidden, queries = m->heads * m->dims, width = queries + 2 * m->kv_heads * m->dims;
    int64_t inner = m->intermediate, half = m->is_half;
    float *hidden = work, *normed = hidden + num * size, *qkv = normed + num * size, *mixed = qkv + num * width;
    float *active = mixed + num * queries, *scores = active + num * inner, epsilon = (float)m->epsilon;
    for (int64_t i = 0; i < num; i++) embed(m, ids[i], hidden + i * size);
    const struct adapter **of = adapters ? adapters->of : 0;
    for (int64_t i = 0; of && i < num; i++) of[i] = adapters->of_row[rows[i]];
    for (int64_t number = 0; number < m->num_layers; number++) {
        int64_t at = number * PLACES;
        const struct layer *layer = m->layers + number;
        struct attention a = {layer->head_norms, m->rotations, keys[number], values[number], scores,
                              epsilon,           m->heads,     m->kv_heads,  capacity,       threads};
        /* Of the last layer only keys and values of the others are needed. */
        const int64_t *only = number + 1 == m->num_layers ? wanted : 0;
        rms_norm(hidden, layer->input_norm, epsilon, normed, num, size);
        multiply(&(struct product){normed, layer->qkv, layer->qkv_bias, qkv, size, width, num, size, width, STORE, 0, half}, threads);
        if (of) adapt(of, at + QUERY, 3, normed, size, qkv, width, num, threads);
        attend(qkv, rows, places, only, mixed, num, &a, m->dims);
        if (only && of) keep_adapters(of, only, num);
        if (only) num = keep_wanted(hidden, only, num, size);
        multiply(&(struct product){mixed, layer->output, 0, hidden, queries, size, num, queries, size, ADD, 0, half}, threads);
        if (of) adapt(of, at + OUTPUT, 1, mixed, queries, hidden, size, num, threads);
        rms_norm(hidden, layer->post_norm, epsilon, normed, num, size);
        if (of) adapt_gates(adapters, number, normed, size, inner, num, threads);
        multiply(&(struct product){normed, layer->gate_up, 0, active, size, inner, num, size, inner, GATE, of ? adapters->plus : 0, half},
                 threads);
        multiply(&(struct product){active, layer->down, 0, hidden, inner, size, num, inner, size, ADD, 0, half}, threads);
        if (of) adapt(of, at + DOWN, 1, active, inner, hidden, size, num, threads);
    }
    rms_norm(hidden, m->final_norm, epsilon, normed, num, size);
    multiply(&(struct product){normed, m->head, 0, logits, size, m->vocab, num, size, m->vocab, STORE, 0, half}, threads);
    return num;
}

/* Append positions to the rows of the cache, and compute the logits behind those that are wanted (all where NULL).

   ids, rows, places, wanted [num], those of a row in order; keys and values [layers] caches; work as `work_size` says;
   logits [wanted, vocab]; adapters of rows of the cache, or NULL. */
void forward(const struct model *m, float *const *keys, float *const *values, int64_t capacity, const int64_t *ids,
             const int64_t *rows, const int64_t *places, const int64_t *wanted, int64_t num, int64_t at_once, int64_t threads,
             float *work, float *logits, const struct adapters *adapters)
{
    for (int64_t start = 0; start < num; start += at_once) {
        int64_t part = num - start < at_once ? num - start : at_once;
        logits += m->vocab * forward_part(m, keys, values, capacity, ids + start, rows + start, places + start,
                                          wanted ? wanted + start : 0, part, threads, work, logits, adapters);
    }
}

/* Count the floats that `forward` works with on so many threads, or fewer. */
int64_t work_size(const struct model *m, int64_t capacity, int64_t at_once, int64_t threads)
{
    int64_t queries = m->heads * m->dims, width = queries + 2 * m->kv_heads * m->dims;
    return at_once * (2 * m->hidden + width + queries + m->intermediate) + threads * m->heads * capacity;
}

/* Copy the beginnings of rows of a cache [rows, kv_heads, room] to others: `size` floats of each head. */
void copy_rows(float *cache, const int64_t *sources, const int64_t *targets, int64_t num, int64_t kv_heads, int64_t size,
               int64_t room)
{
    for (int64_t i = 0; i < num; i++)
        for (int64_t head = 0; head < kv_heads; head++)
            memcpy(cache + (targets[i] * kv_heads + head) * room, cache + (sources[i] * kv_heads + head) * room,
                   size * sizeof(float));
}

/* Sample one token per row of logits [rows, size]: the first whose cumulative probability exceeds the row's draw.

   temperatures [rows] or NULL; scratch [size]; sums [size / SUMMED, rounded up]. A row that has a logit that is no number
   gets a log-probability that is none either. */
void sample(const float *logits, const double *draws, const float *temperatures, float *scratch, double *sums, int64_t *tokens,
            float *log_probs, int64_t rows, int64_t size)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * size;
        float factor = 1.0f / (temperatures ? temperatures[row] : 1.0f), most = -INFINITY;
        double total = 0, before = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < size; i++) most = x[i] > most ? x[i] : most;
        for (int64_t start = 0; start < size; start += SUMMED) {
            int64_t end = start + SUMMED < size ? start + SUMMED : size;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < end; i++) {
                scratch[i] = exponential((x[i] - most) * factor);
                sum += scratch[i];
            }
            sums[start / SUMMED] = (double)sum;
            total += (double)sum;
        }
        double threshold = draws[row] * total;
        int64_t token = total == total ? 0 : size; /* Past the end: it has no total. */
        while (token + SUMMED < size && before + sums[token / SUMMED] <= threshold) {
            before += sums[token / SUMMED];
            token += SUMMED;
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
