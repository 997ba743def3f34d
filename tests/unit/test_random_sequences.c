/* test_random_sequences.c - random calls to a cache with up to 32 sequences: appends of one or of
 * several sequences, forks, cuts, dropped blocks, exports and imports, refused calls.
 *
 * A model in the test knows which token every place of every sequence holds. After each call the
 * rows of a sequence must be its tokens' rows, up to the error of the codec. Attention must be what
 * double precision computes from the rows that the cache reads back.
 *
 * KVANT_RANDOM_SEEDS: the number of seeds; KVANT_RANDOM_SEED: the first. */
#include "testing.h"

#include <kvant/cache.h>

#include "../attention_reference.h"

enum {
    LAYERS = 2,
    KV_HEADS = 2,
    HEADS = 4,
    DIM = 64,
    WIDTH = KV_HEADS * DIM,
    Q_WIDTH = HEADS * DIM,
    MOST_SEQUENCES = 32,
    MOST_TOKENS = 6000, /* of all sequences */
    MOST_STEP = 700,
    LONGEST = 2048,
    OPERATIONS = 50
};

typedef struct config {
    const char *preset, *k, *v;
    /* The largest squared error of a row that was quantised twice, as a part of its squared norm.
     * Another token's row differs by about 2. */
    double most_error;
    bool rope, centers;
} config;

static const config configs[] = {
    { .preset = "quality", .most_error = 0.05 },
    { .preset = "balanced", .most_error = 0.1, .rope = true },
    { .preset = "small", .most_error = 0.3, .rope = true, .centers = true },
    { .preset = "tiny", .most_error = 0.9 },
    { .preset = "tiny", .most_error = 0.9, .rope = true, .centers = true },
    { .k = "f16", .v = "f16", .most_error = 1e-5 },
    { .k = "int-8:axis=channel,group=32,recent=70,sink=4", .v = "int-8", .most_error = 0.01 },
    { .k = "turboquant-4:center=first,norm=first,transform=first",
      .v = "trellis-4:center=first",
      .most_error = 0.15 },
};

typedef struct sequence {
    int32_t id;        /* -1: there is none */
    uint32_t n, first; /* tokens; tokens before `first` were dropped */
    uint32_t tokens[LONGEST];
} sequence;

typedef struct run {
    const config *config;
    kvant_cache *cache;
    sequence sequences[MOST_SEQUENCES];
    uint32_t n_sequences, next_token, at;
    uint64_t rng, seed;
    const char *what;
} run;

static uint32_t below(run *r, uint32_t n)
{
    return n ? (uint32_t)(test_random(&r->rng) % n) : 0;
}

static void fail_run(const run *r, const char *what)
{
    fail_msg("seed %llu, call %u (%s), %s: %s", (unsigned long long)r->seed, (unsigned)r->at,
             r->what, r->config->preset ? r->config->preset : r->config->k, what);
}

static void check_status(const run *r, kvant_status got, kvant_status want)
{
    if (got != want) {
        print_message("status %d, not %d: %s\n", (int)got, (int)want, kvant_error_message());
        fail_run(r, "status");
    }
}

/* The row of a token in a layer. Channels have different sizes and means, as keys have. Every
 * thousandth token begins another kind of text. */
static void row_of(uint32_t token, uint32_t layer, bool values, float *row)
{
    uint64_t rng = (((uint64_t)token * LAYERS + layer) * 2 + values) * 0x9e3779b97f4a7c15u + 1;
    const uint32_t kind = token / 1000;
    test_random(&rng);
    for (uint32_t j = 0; j < WIDTH; j++) {
        const float size = values || j % 7 ? 1 : 4,
                    mean = values ? 0 : (float)(j * (kind + 1) % 5) / 2 - 1;
        row[j] = size * test_normal(&rng) + mean;
    }
}

static float *rows_of(const uint32_t *tokens, uint32_t n, uint32_t layer, bool values)
{
    float *rows = malloc(((size_t)n + 1) * WIDTH * sizeof *rows);
    assert_non_null(rows);
    for (uint32_t i = 0; i < n; i++)
        row_of(tokens[i], layer, values, rows + (size_t)i * WIDTH);
    return rows;
}

/* Checking */

static void check_rows(run *r, const sequence *s, uint32_t layer, const float *got, bool values)
{
    for (uint32_t i = s->first; i < s->n; i++) {
        float want[WIDTH];
        row_of(s->tokens[i], layer, values, want);
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            const float *x = got + (size_t)i * WIDTH + h * DIM;
            const double error = squared_distance(x, want + h * DIM, DIM),
                         size = squared_distance(want + h * DIM, (float[DIM]){ 0 }, DIM);
            if (!(error <= r->config->most_error * size)) {
                print_message("sequence %d: row %u of %u, layer %u, %s: error %.4f\n", s->id, i,
                              s->n, layer, values ? "values" : "keys", error / size);
                fail_run(r, "a row is not the token's");
            }
        }
    }
}

/* Exact attention errs by the rounding of binary32, as in test_problem.c. */
#define EXACT 1e-3

static void check_attention(run *r, const sequence *s, uint32_t layer, const float *k,
                            const float *v)
{
    static float q[40 * Q_WIDTH], out[40 * Q_WIDTH], lse[40 * HEADS];
    static double weights[LONGEST];
    const uint32_t most = s->n - s->first, n = 1 + below(r, most < 40 ? most : 40),
                   window = below(r, 3) ? 0 : 1 + below(r, 200);
    const float softcap = below(r, 4) ? 0 : 20;
    fill_normal(q, (size_t)n * Q_WIDTH, &r->rng);
    kvant_attention_problem p = { .size = sizeof p,
                                  .n_queries = n,
                                  .q = q,
                                  .q_token_stride = Q_WIDTH,
                                  .q_head_stride = DIM,
                                  .out = out,
                                  .out_token_stride = Q_WIDTH,
                                  .out_head_stride = DIM,
                                  .lse = lse,
                                  .logit_softcap = softcap,
                                  .window = window,
                                  .causal = true,
                                  .exact = true };
    check_status(r, kvant_cache_attention(r->cache, layer, s->id, &p), KVANT_OK);
    double largest = 0;
    for (size_t i = (size_t)s->first * WIDTH; i < (size_t)s->n * WIDTH; i++)
        largest = fmax(largest, fabsf(v[i]));
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t h = 0; h < HEADS; h++) {
            const uint32_t position = s->n - n + t;
            uint32_t first = window && position + 1 > window ? position + 1 - window : 0;
            first = first > s->first ? first : s->first;
            double want[DIM];
            const size_t head = h / (HEADS / KV_HEADS) * DIM, at = (size_t)t * HEADS + h;
            const reference_row row = { .q = q + at * DIM,
                                        .keys = k + (size_t)first * WIDTH + head,
                                        .values = v + (size_t)first * WIDTH + head,
                                        .key_stride = WIDTH,
                                        .value_stride = WIDTH,
                                        .n_cells = position + 1 - first,
                                        .k_dim = DIM,
                                        .v_dim = DIM,
                                        .scale = 1 / sqrt(DIM),
                                        .softcap = softcap };
            reference_attention(&row, weights, want);
            for (uint32_t j = 0; j < DIM; j++)
                if (!(fabs(out[at * DIM + j] - want[j]) <= EXACT * largest)) {
                    print_message("sequence %d, layer %u, query %u of %u, head %u, channel %u: %g, "
                                  "not %g\n",
                                  s->id, layer, t, n, h, j, (double)out[at * DIM + j], want[j]);
                    fail_run(r, "attention differs");
                }
        }
}

static void check_sequence(run *r, const sequence *s)
{
    if (s->id < 0)
        return;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        if (kvant_sequence_length(r->cache, s->id, layer) != s->n)
            fail_run(r, "length");
        float *k = calloc((size_t)s->n + 1, WIDTH * sizeof *k),
              *v = calloc((size_t)s->n + 1, WIDTH * sizeof *v);
        if (s->n == s->first || (layer == 0 && below(r, 4) == 0)) {
            free(k);
            free(v);
            continue;
        }
        check_status(r, kvant_cache_read(r->cache, layer, s->id, 0, s->n, k, v), KVANT_OK);
        check_rows(r, s, layer, k, false);
        check_rows(r, s, layer, v, true);
        check_attention(r, s, layer, k, v);
        free(k);
        free(v);
    }
}

/* Calls */

static void note_queries(run *r, uint32_t layer, uint32_t n)
{
    if (below(r, 3) || !kvant_cache_wants_queries(r->cache, layer, n))
        return;
    float *q = malloc((size_t)n * Q_WIDTH * sizeof *q);
    fill_normal(q, (size_t)n * Q_WIDTH, &r->rng);
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = q,
                                    .token_stride = Q_WIDTH,
                                    .head_stride = DIM,
                                    .n_tokens = n,
                                    .n_heads = HEADS };
    check_status(r, kvant_cache_note_queries(r->cache, layer, &queries), KVANT_OK);
    free(q);
}

/* New tokens for n sequences. Every hundredth call has a row that is refused. */
static void append(run *r, sequence *const *list, uint32_t n_list, uint32_t n)
{
    uint32_t *tokens = malloc((size_t)n_list * n * sizeof *tokens);
    int32_t ids[MOST_SEQUENCES];
    kvant_status status = KVANT_OK;
    for (uint32_t i = 0; i < n_list * n; i++)
        tokens[i] = r->next_token++;
    for (uint32_t i = 0; i < n_list; i++)
        ids[i] = list[i]->id;
    uint32_t layer = 0;
    const bool refused = below(r, 8) == 0;
    for (; layer < LAYERS && status == KVANT_OK; layer++) {
        float *k = rows_of(tokens, n_list * n, layer, false),
              *v = rows_of(tokens, n_list * n, layer, true);
        note_queries(r, layer, n_list * n);
        if (refused) {
            float *at = (below(r, 2) ? k : v) + below(r, n_list * n * WIDTH), kept = *at;
            *at = below(r, 2) ? NAN : 1e30f;
            status = kvant_cache_append_batch(r->cache, layer, ids, n_list, k, v, n);
            if (status == KVANT_OK)
                fail_run(r, "a row that is not finite was accepted");
            for (uint32_t i = 0; i < n_list; i++)
                if (kvant_sequence_length(r->cache, ids[i], layer) != list[i]->n)
                    fail_run(r, "length after a refused row");
            *at = kept;
        }
        status = kvant_cache_append_batch(r->cache, layer, ids, n_list, k, v, n);
        if (status != KVANT_OK && status != KVANT_ERR_FULL && status != KVANT_ERR_ARGUMENT)
            check_status(r, status, KVANT_OK);
        free(k);
        free(v);
    }
    if (status != KVANT_OK)
        for (uint32_t i = 0; i < n_list; i++) /* layers before have the tokens */
            check_status(r, kvant_sequence_truncate(r->cache, ids[i], list[i]->n), KVANT_OK);
    for (uint32_t i = 0; i < n_list && status == KVANT_OK; i++) {
        memcpy(list[i]->tokens + list[i]->n, tokens + (size_t)i * n, n * sizeof *tokens);
        list[i]->n += n;
    }
    free(tokens);
}

static uint32_t choose_step(run *r)
{
    static const uint32_t most[] = { 1, 1, 3, 9, 64, 65, 130, 300, MOST_STEP };
    return 1 + below(r, most[below(r, COUNT(most))]);
}

static void grow(run *r, sequence *s)
{
    const uint32_t n = choose_step(r);
    if (s->n + n > LONGEST)
        return;
    append(r, &s, 1, n);
}

static void grow_many(run *r, sequence *s)
{
    sequence *list[MOST_SEQUENCES];
    uint32_t n_list = 0, n = below(r, 2) ? 1 : 1 + below(r, 40);
    (void)s;
    for (uint32_t i = 0; i < r->n_sequences; i++)
        if (r->sequences[i].id >= 0 && r->sequences[i].n + n <= LONGEST && below(r, 3))
            list[n_list++] = &r->sequences[i];
    if (n_list)
        append(r, list, n_list, n);
}

static void cut(run *r, sequence *s)
{
    const uint32_t few = s->n < 20 ? s->n + 1 : 20,
                   n = below(r, 2) ? below(r, s->n + 1) : s->n - below(r, few);
    check_status(r, kvant_sequence_truncate(r->cache, s->id, n), KVANT_OK);
    s->n = n;
    if (s->first > s->n) /* no row can be stored in a dropped block */
        s->first = s->n;
}

static sequence *none_of(run *r)
{
    for (uint32_t i = 0; i < r->n_sequences; i++)
        if (r->sequences[i].id < 0)
            return &r->sequences[i];
    return NULL;
}

static void end_sequence(run *r, sequence *s)
{
    kvant_sequence_free(r->cache, s->id);
    s->id = -1;
}

static void fork_sequence(run *r, sequence *s)
{
    sequence *to = none_of(r);
    const int32_t id = kvant_sequence_fork(r->cache, s->id);
    if ((id >= 0) != (to != NULL))
        fail_run(r, "fork");
    if (!to)
        return;
    *to = *s;
    to->id = id;
    if (below(r, 2))
        cut(r, to);
    if (below(r, 2))
        grow(r, to);
}

static void drop_blocks(run *r, sequence *s)
{
    const uint32_t n = below(r, s->n + 1);
    if (s->n == 0 || below(r, 3))
        return;
    check_status(r, kvant_sequence_drop(r->cache, s->id, n), KVANT_OK);
    s->first = n / 64 * 64 > s->first ? n / 64 * 64 : s->first;
}

/* Exports blocks of a sequence and appends them to a new sequence, or to one of whole blocks. */
static void move(run *r, sequence *s)
{
    sequence *to = below(r, 2) ? none_of(r) : &r->sequences[below(r, r->n_sequences)];
    if (s->n == s->first || !to)
        return;
    const uint32_t begin = (s->first + 63) / 64, end = (s->n + 63) / 64,
                   first = begin + below(r, end - begin), n_blocks = 1 + below(r, end - first);
    size_t bytes;
    if (first >= end || s->first % 64)
        return;
    check_status(r, kvant_sequence_export_size(r->cache, s->id, first, n_blocks, &bytes), KVANT_OK);
    void *data = malloc(bytes);
    check_status(r, kvant_sequence_export(r->cache, s->id, first, n_blocks, data, bytes), KVANT_OK);
    if (to->id < 0) {
        *to = (sequence){ .id = kvant_sequence_create(r->cache) };
        if (to->id < 0)
            fail_run(r, "create");
    }
    const uint32_t last = (first + n_blocks) * 64 < s->n ? (first + n_blocks) * 64 : s->n,
                   n = last - first * 64;
    const kvant_status status = kvant_sequence_import(r->cache, to->id, data, bytes);
    free(data);
    if (to->n % 64)
        check_status(r, status, KVANT_ERR_ARGUMENT);
    else if (status != KVANT_ERR_FULL)
        check_status(r, status, KVANT_OK);
    if (status != KVANT_OK)
        return;
    if (to->n + n > LONGEST) {
        end_sequence(r, to);
        return;
    }
    memmove(to->tokens + to->n, s->tokens + first * 64, n * sizeof *to->tokens);
    to->n += n;
}

static const struct {
    const char *name;
    void (*act)(run *, sequence *);
    uint32_t weight;
} calls[] = {
    { "append", grow, 8 },        { "append_batch", grow_many, 6 }, { "truncate", cut, 3 },
    { "fork", fork_sequence, 3 }, { "free", end_sequence, 1 },      { "drop", drop_blocks, 1 },
    { "export", move, 3 },
};

static void call(run *r)
{
    sequence *s = &r->sequences[below(r, r->n_sequences)];
    uint32_t total = 0, which = 0;
    if (s->id < 0)
        *s = (sequence){ .id = kvant_sequence_create(r->cache) };
    for (uint32_t i = 0; i < COUNT(calls); i++)
        total += calls[i].weight;
    for (uint32_t at = below(r, total); at >= calls[which].weight; which++)
        at -= calls[which].weight;
    r->what = calls[which].name;
    calls[which].act(r, s);
    check_sequence(r, s);
    check_sequence(r, &r->sequences[below(r, r->n_sequences)]);
}

static void set_rope(run *r)
{
    float frequencies[DIM / 2];
    for (uint32_t i = 0; i < DIM / 2; i++)
        frequencies[i] = powf(10000, -2 * (float)i / DIM);
    const kvant_rope rope = { .size = sizeof rope,
                              .n_dims = DIM,
                              .frequencies = frequencies,
                              .block_centers = r->config->centers };
    for (uint32_t layer = 0; layer < LAYERS && r->config->rope; layer++)
        check_status(r, kvant_cache_set_rope(r->cache, layer, &rope), KVANT_OK);
}

static void run_seed(uint64_t seed)
{
    static run r;
    r = (run){ .config = &configs[seed % COUNT(configs)],
               .seed = seed,
               .rng = seed * 0x9e3779b97f4a7c15u,
               .what = "create" };
    static const uint32_t numbers[] = { 1, 3, 8, MOST_SEQUENCES };
    r.n_sequences = numbers[below(&r, COUNT(numbers))];
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS;
    params.head_dim = DIM, params.max_tokens = MOST_TOKENS;
    params.max_sequences = r.n_sequences;
    params.n_threads = 1 + below(&r, 3);
    params.preset = r.config->preset, params.k = r.config->k, params.v = r.config->v;
    check_status(&r, kvant_cache_create(&params, &r.cache), KVANT_OK);
    for (uint32_t i = 0; i < MOST_SEQUENCES; i++)
        r.sequences[i].id = -1;
    set_rope(&r);
    for (r.at = 0; r.at < OPERATIONS; r.at++)
        call(&r);
    r.what = "end";
    for (uint32_t i = 0; i < r.n_sequences; i++)
        check_sequence(&r, &r.sequences[i]);
    kvant_cache_free(&r.cache);
}

CASE(sequences_hold_their_tokens)
{
    const char *n = getenv("KVANT_RANDOM_SEEDS"), *first = getenv("KVANT_RANDOM_SEED");
    const uint64_t seed = first ? strtoull(first, NULL, 10) : 1;
    for (uint64_t i = 0; i < (n ? strtoull(n, NULL, 10) : COUNT(configs)); i++)
        run_seed(seed + i);
}

RUN_CASES(NULL, NULL)
