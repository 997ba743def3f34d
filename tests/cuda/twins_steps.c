/* twins_steps.c - see twins.h. */
#include "twins.h"

#include "../../src/cache/cuda_layers.h"

enum { BATCH = 2 };

/* Keys and values of one sequence of a layer. */
typedef struct rows {
    float k[MOST][WIDTH], v[MOST][WIDTH];
    uint32_t n;
} rows;

static void read_rows(twins *t, uint32_t layer, int32_t s, rows *r)
{
    const uint32_t n = kvant_sequence_length(t->gpu, s, layer);
    void *k = device_new(sizeof r->k, 0xff), *v = device_new(sizeof r->v, 0xff);
    if (kvant_cache_read(t->gpu, layer, s, 0, n, k, v) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    device_read(r->k, k, sizeof r->k);
    device_read(r->v, v, sizeof r->v);
    cudaFree(k);
    cudaFree(v);
    r->n = n;
}

/* Whether a token's rows may differ between the devices by more than rounding. If a preset's cache
 * learns, rows of a block that changes its transform pass through codes only on a GPU. */
static bool differs(const twins *t, uint32_t layer, int32_t s, uint32_t token)
{
    if (t->spec->preset && !t->spec->calibrated)
        return true;
    const cuda_layer *l = kvant_cuda_layer(t->gpu, layer);
    const uint32_t block = (uint32_t)t->gpu->sequences[s].table[token / 64];
    const kvant_tensor *const *cpu = (const kvant_tensor *const *)&t->cpu->tensors[2 * layer];
    return kvant_cuda_exact_page(&l->parts[0], block) >= 0 ||
           kvant_cuda_exact_page(&l->parts[1], block) >= 0 ||
           (t->spec->preset &&
            (cpu[0]->blocks[block].open_page >= 0 || cpu[1]->blocks[block].open_page >= 0));
}

/* If both devices have codes, the GPU's rows equal the CPU's except for rounding. */
void twins_read(twins *t, int32_t s)
{
    static rows all;
    static float k[MOST][WIDTH], v[MOST][WIDTH];
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        read_rows(t, layer, s, &all);
        assert_int_equal(kvant_cache_read(t->cpu, layer, s, 0, all.n, k[0], v[0]), KVANT_OK);
        for (uint32_t token = 0; token < all.n; token++)
            for (uint32_t i = 0; i < WIDTH && !differs(t, layer, s, token); i++) {
                const float cpu[] = { k[token][i], v[token][i] },
                            gpu[] = { all.k[token][i], all.v[token][i] };
                if (!(fabsf(gpu[0] - cpu[0]) <= 1e-3f * (1 + fabsf(cpu[0]))) ||
                    !(fabsf(gpu[1] - cpu[1]) <= 1e-3f * (0.1f + fabsf(cpu[1]))))
                    fail_msg("%s / %s: token %u, channel %u: %g and %g, on the CPU %g and %g",
                             t->spec->k, t->spec->v, token, i, (double)gpu[0], (double)gpu[1],
                             (double)cpu[0], (double)cpu[1]);
            }
    }
}

/* Decode kernels read a codebook of 2 to 4 bits as bytes over +-2.73 scales. The error of a number
 * is 2 x 2.73 / 255 / sqrt(12) of a scale. The test allows six deviations. */
static double noise_of(const char *spec)
{
    return strncmp(spec, "turboquant-", 11) == 0 && spec[11] <= '4' ? 6 * 0.0062 : 0;
}

/* Root mean square of a row's numbers, which is its scale. */
static double scale_of(const float *row)
{
    double squares = 0;
    for (uint32_t j = 0; j < DIM; j++)
        squares += (double)row[j] * (double)row[j];
    return sqrt(squares / DIM);
}

/* Attention of a head's newest token over rows, in binary64. The array sizes has the same with the
 * values' magnitudes, to which errors of weights are relative. The number remains is the part of
 * the values' errors that remains if they are independent, in scales of tokens. */
static void attend_rows(const rows *r, uint32_t head, const float *q, uint32_t window,
                        double out[DIM], double sizes[DIM], double *remains)
{
    const uint32_t kv = head / (HEADS / KV_HEADS) * DIM,
                   first = window && window < r->n ? r->n - window : 0;
    static double weights[MOST];
    double top = -INFINITY, sum = 0;
    for (uint32_t i = first; i < r->n; i++) {
        weights[i] = 0;
        for (uint32_t j = 0; j < DIM; j++)
            weights[i] += (double)q[j] * (double)r->k[i][kv + j] / sqrt(DIM);
        top = fmax(top, weights[i]);
    }
    for (uint32_t i = first; i < r->n; i++)
        sum += weights[i] = exp(weights[i] - top);
    *remains = 0;
    for (uint32_t i = first; i < r->n; i++)
        *remains += pow(weights[i] / sum * scale_of(r->v[i] + kv), 2);
    for (uint32_t j = 0; j < DIM; j++) {
        out[j] = sizes[j] = 0;
        for (uint32_t i = first; i < r->n; i++) {
            out[j] += weights[i] / sum * (double)r->v[i][kv + j];
            sizes[j] += weights[i] / sum * fabs((double)r->v[i][kv + j]);
        }
    }
}

/* Queries are rounded to fp16. Kernels for any pair also round keys, chunks three times and all
 * remaining codes once. Each rounding errs by 2^-11 of scores, which reach 10 with random rows and
 * 50 with the calibration's rows. Weights change by twice that. */
static double error_of_weights(const twins *t)
{
    const bool chunks =
        strncmp(t->spec->k, "octopus", 7) == 0 || strncmp(t->spec->k, "hqmq", 4) == 0;
    return 2 * 0x1p-11 * (chunks ? 4 : 2) * (t->spec->calibrated ? 50 : 10);
}

static void compare(twins *t, const rows *r, const float *q, const float *out, uint32_t window)
{
    for (uint32_t head = 0; head < HEADS; head++) {
        double want[DIM], sizes[DIM], error = 0, size = 0, remains, keys = 0;
        attend_rows(r, head, q + head * DIM, window, want, sizes, &remains);
        for (uint32_t i = 0; i < r->n; i++)
            keys = fmax(keys, scale_of(r->k[i] + head / (HEADS / KV_HEADS) * DIM));
        for (uint32_t j = 0; j < DIM; j++) {
            error = fmax(error, fabs(want[j] - (double)out[head * DIM + j]));
            size = fmax(size, sizes[j]);
        }
        const double of_weights =
            error_of_weights(t) + noise_of(t->spec->k) * keys * scale_of(q + head * DIM);
        if (!(error <= of_weights * size + noise_of(t->spec->v) * sqrt(remains)))
            fail_msg("%s / %s: a step's output of head %u at %u tokens is off by %g of %g",
                     t->spec->k, t->spec->v, head, r->n, error, size);
    }
}

static void take_step(twins *t, uint32_t layer, rows state[BATCH], uint32_t window)
{
    float *q = random_rows(BATCH * Q_WIDTH, 1), *k = random_rows(BATCH * WIDTH, 0.5f),
          *v = random_rows(BATCH * WIDTH, 0.5f);
    float out[BATCH * Q_WIDTH];
    kvant_step step = { .size = sizeof step, .window = window };
    void *of[] = { device_copy(q, BATCH * Q_WIDTH * sizeof *q),
                   device_copy(k, BATCH * WIDTH * sizeof *k),
                   device_copy(v, BATCH * WIDTH * sizeof *v), device_new(sizeof out, 0xff) };
    step.q = of[0], step.k = of[1], step.v = of[2], step.out = of[3];
    if (kvant_cache_step(t->gpu, layer, &step) != KVANT_OK)
        fail_msg("%s / %s: %s", t->spec->k, t->spec->v, kvant_error_message());
    device_read(out, of[3], sizeof out);
    for (uint32_t i = 0; i < BATCH; i++) {
        rows *r = &state[i];
        memcpy(r->k[r->n], k + i * WIDTH, sizeof *r->k);
        memcpy(r->v[r->n++], v + i * WIDTH, sizeof *r->v);
        compare(t, r, q + i * Q_WIDTH, out + i * Q_WIDTH, window);
    }
    for (int i = 0; i < 4; i++)
        cudaFree(of[i]);
    free(q);
    free(k);
    free(v);
}

void twins_attend_rows(twins *t, int32_t s, uint32_t n)
{
    static rows all;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        read_rows(t, layer, s, &all);
        const uint32_t length = all.n;
        const size_t bytes = (size_t)n * Q_WIDTH * sizeof(float);
        float *q = random_rows((size_t)n * Q_WIDTH, 1), *out = malloc(bytes);
        void *gpu_q = device_copy(q, bytes), *gpu_out = device_new(bytes, 0xff);
        if (kvant_cache_attend(t->gpu, layer, s, gpu_q, gpu_out, n) != KVANT_OK)
            fail_msg("%s / %s: %s", t->spec->k, t->spec->v, kvant_error_message());
        device_read(out, gpu_out, bytes);
        for (uint32_t i = 0; i < n; i++) {
            all.n = length - n + 1 + i;
            compare(t, &all, q + (size_t)i * Q_WIDTH, out + (size_t)i * Q_WIDTH, 0);
        }
        cudaFree(gpu_q);
        cudaFree(gpu_out);
        free(q);
        free(out);
    }
}

/* The fp16 keys of a sequence's next token in its exact page. */
static void read_next(const twins *t, int32_t s, uint16_t keys[DIM])
{
    const cuda_part *part = &kvant_cuda_layer(t->gpu, 0)->parts[KVANT_ROLE_K];
    const uint32_t length = twins_length(t, s);
    const int32_t page =
        kvant_cuda_exact_page(part, (uint32_t)t->gpu->sequences[s].table[length / 64]);
    assert_true(page >= 0);
    device_read(keys, (uint16_t *)kvant_cuda_exact_at(part, page) + length % 64 * DIM,
                DIM * sizeof *keys);
}

static void append_taken(twins *t, uint32_t layer, int32_t s, const rows *r)
{
    const uint32_t first = kvant_sequence_length(t->gpu, s, layer), n = r->n - first;
    assert_int_equal(twins_append_rows(t, s, layer, r->k[first], r->v[first], n), KVANT_OK);
}

/* Makes a round of at most `most` steps. Afterwards the rows are appended, and both caches are the
 * same. */
void twins_take_steps(twins *t, uint32_t most, uint32_t window)
{
    static rows state[LAYERS][BATCH];
    static const int32_t sequences[BATCH] = { 0, 1 };
    kvant_steps_info info = { .size = sizeof info };
    if (kvant_steps_begin(t->gpu, sequences, BATCH, &info) != KVANT_OK)
        fail_msg("%s / %s: %s", t->spec->k, t->spec->v, kvant_error_message());
    assert_int_equal(info.n_steps,
                     64 - (twins_length(t, 0) % 64 > twins_length(t, 1) % 64 ? twins_length(t, 0)
                                                                             : twins_length(t, 1)) %
                              64);
    for (uint32_t i = 0; i < LAYERS * BATCH; i++)
        read_rows(t, i / BATCH, sequences[i % BATCH], &state[i / BATCH][i % BATCH]);
    uint16_t before[BATCH][DIM], after[DIM];
    for (int i = 0; i < BATCH && t->spec->preset; i++)
        read_next(t, i, before[i]);
    for (uint32_t i = 0; i < info.n_steps && i < most; i++) {
        assert_int_equal(kvant_steps_next(t->gpu), KVANT_OK);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            take_step(t, layer, state[layer], window);
    }
    /* rows of a preset's steps are in their exact pages */
    for (int i = 0; i < BATCH && t->spec->preset; i++) {
        read_next(t, i, after);
        assert_memory_not_equal(after, before[i], sizeof after);
    }
    if (info.n_steps <= most)
        assert_int_equal(kvant_steps_next(t->gpu), KVANT_ERR_ARGUMENT);
    for (uint32_t i = 0; i < LAYERS * BATCH; i++)
        append_taken(t, i / BATCH, sequences[i % BATCH], &state[i / BATCH][i % BATCH]);
    twins_compare(t);
}

void twins_steps(const spec_pair *spec)
{
    twins t;
    kvant_steps_info info = { .size = sizeof info };
    twins_new(&t, spec, SEQUENCES);
    if (strstr(spec->k, "transform=first"))
        twins_learn(&t);
    for (int i = 0; i < BATCH; i++) {
        kvant_sequence_create(t.cpu);
        kvant_sequence_create(t.gpu);
    }
    assert_int_equal(kvant_steps_begin(t.gpu, (const int32_t[]){ 0 }, 1, &info),
                     KVANT_ERR_UNSUPPORTED);
    assert_int_equal(kvant_steps_begin(t.cpu, (const int32_t[]){ 0 }, 1, &info),
                     KVANT_ERR_UNSUPPORTED);
    assert_int_equal(kvant_steps_next(t.gpu), KVANT_ERR_ARGUMENT);
    twins_append(&t, 0, 100);
    twins_append(&t, 1, 64);
    twins_take_steps(&t, 64, 0);
    twins_append(&t, 1, 36);
    twins_take_steps(&t, 5, 90);
    twins_read(&t, 0);
    twins_take_steps(&t, 64, 0);
    twins_read(&t, 1);
    if (strstr(spec->k, "transform=first"))
        twins_attend_rows(&t, 1, 20);
    twins_free(&t);
}
