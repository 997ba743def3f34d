/* weigh.c - matrices of keys from the first rows and queries (transform=first).
 *
 * A tensor in the computer's memory learns, as it does there, from prompts: its matrices are those of a CPU's cache.
 * It keeps several versions. Here there is one: when the tensor makes a better one, the rows that were stored meanwhile take it
 * (anew.c). What comes after 16384 tokens finds the cache as it is. As other rows have to live with a matrix, tokens that are too much
 * alike make none.
 *
 * A thread per layer and batch learns while the GPU goes on, after that of the batch before. Keys of the first batches wait as fp16 for
 * the matrix of the last of these (open.c); later its matrix is in force from the next graph on. So results depend on no clock. */
#include "gpu.h"

#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"
#include "../rope.h"

#define MOST_AT_ONCE 16 /* layers */
#define LOW_PRIORITY 10
#define ASKED_TOKENS 128u /* of a batch, whose queries kvant_tensor_note_queries looks at */
#define LEAST_ROWS ((int64_t)KVP_FEW_TOKENS + 1) /* of a batch: fewer may be in a captured graph */
#define WEIGH_BATCH 512u /* rows that the tensor judges together */
#define MOST_PLAIN 2048u /* rows in the computer's memory */

/* Rows that a thread looks at, with their queries. */
struct batch {
    struct batch *before; /* whose thread ends first; NULL: none */
    kvp_gpu_cells *cells;
    struct kvp_gpu_copies *copies;
    abi_tensor keys, queries;    /* there */
    int32_t *positions, *asked;  /* of keys, of queries; NULL: not known */
    size_t first, n;             /* of the learner's rows */
    pthread_t thread;
    bool begun, alone, ok; /* begun: its queries came. alone: in a thread of its own */
    bool waits;            /* nothing else reads the cells' numbers */
    atomic_bool followed;  /* by a batch that was begun */
};

typedef struct kvp_gpu_learner {
    kvant_codec *codec; /* encodes quickly, learns the same */
    kvant_tensor *tensor;
    void *memory;
    float *rows; /* of cells of cache->plain, as far as they came */
    size_t n, most;
    char *queries;             /* room for copies of a batch's */
    atomic_bool queries_taken; /* by a thread */
    uint32_t version; /* of the tensor, that was asked for last, and its centre */
    float *center;
    struct batch *last;   /* whose thread may run, or which waits for its queries */
    kvant_codec **made;   /* of the new version, per kv head; NULL: there is none */
    bool failed;          /* a thread, since what was learnt was taken */
    pthread_t maker; /* of codec, tensor and memory */
    bool making;
} kvp_gpu_learner;

static pthread_once_t counted = PTHREAD_ONCE_INIT;
static sem_t at_once; /* layers that learn; a CPU is left to the GPU's caller */

static void count_cpus(void)
{
    const long n = sysconf(_SC_NPROCESSORS_ONLN) - 1;

    sem_init(&at_once, 0, n < 1 ? 1 : n > MOST_AT_ONCE ? MOST_AT_ONCE : (unsigned)n);
}

static void free_made(const kvp_gpu_cells *cells, kvp_gpu_learner *l)
{
    for (uint32_t head = 0; l->made != NULL && head < cells->n_kv_heads; head++)
        kvant_codec_free(&l->made[head]);
    free(l->made);
    l->made = NULL;
}

/* Waits for the thread of a batch, which waits for those before it. */
static void wait_for(struct batch *batch)
{
    while (batch != NULL && !batch->begun)
        batch = batch->before;
    if (batch != NULL && batch->alone)
        pthread_join(batch->thread, NULL);
    if (batch != NULL)
        batch->alone = false;
}

/* Waits for the layer's threads. */
static void finish(kvp_gpu_learner *l)
{
    wait_for(l->last);
    while (l->last != NULL) {
        struct batch *batch = l->last;
        l->last = batch->before;
        l->failed = l->failed || (batch->begun && !batch->ok);
        free(batch->positions);
        free(batch);
    }
}

/* The tensor */

void kvp_gpu_weigh_free(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l == NULL)
        return;
    if (l->making)
        pthread_join(l->maker, NULL);
    finish(l); /* threads find it in cells */
    cells->learner = NULL;
    free_made(cells, l);
    kvant_tensor_free(&l->tensor);
    kvant_codec_free(&l->codec);
    free(l->memory);
    free(l->center);
    free(l->queries);
    free(l->rows);
    free(l);
}

/* Block 0 is for first tokens of sequences, which are fp16 and not learnt from. */
static void create_tensor(kvp_gpu_learner *l, const kvp_gpu_cells *cells)
{
    kvant_codec_info info = { .size = sizeof(info) };
    const kvant_codec **codecs = malloc(cells->n_kv_heads * sizeof(*codecs));
    kvant_tensor_params params = { .size = sizeof(params),
                                   .codecs = codecs,
                                   .n_kv_heads = cells->n_kv_heads,
                                   .n_sequences = 1,
                                   .n_blocks = WEIGH_BATCH / KVANT_PAGE_TOKENS + 1 };
    char spec[64];
    size_t bytes = 0;
    bool ok;

    kvant_codec_get_info(cells->sources[0], &info);
    snprintf(spec, sizeof(spec), "int-8:transform=first,rotate=none,sink=%u", (unsigned)info.sink_tokens);
    ok = codecs != NULL && kvant_codec_create(spec, cells->head_dim, info.role, 0, &l->codec, NULL, 0) == KVANT_OK;
    for (uint32_t head = 0; ok && head < cells->n_kv_heads; head++)
        codecs[head] = l->codec;
    ok = ok && kvant_tensor_size(&params, &bytes) == KVANT_OK;
    l->memory = ok ? aligned_alloc(KVANT_PAGE_ALIGN, (bytes + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN) : NULL;
    if (l->memory != NULL)
        memset(l->memory, 0, bytes);
    l->center = calloc(kvp_gpu_width(cells), sizeof(*l->center));
    if (l->memory != NULL && l->center != NULL)
        kvant_tensor_create(&params, l->memory, &l->tensor);
    free(codecs);
}

/* Room for copies, which is touched: the first touch of a page takes as long as a copy. */
static void make_room(kvp_gpu_learner *l, const kvp_gpu_cells *cells)
{
    const size_t bytes = KVP_ENOUGH_ROWS * kvp_gpu_width(cells) * sizeof(float);

    l->rows = malloc(bytes);
    if (l->rows != NULL) {
        memset(l->rows, 1, bytes);
        l->most = KVP_ENOUGH_ROWS;
    }
    l->queries = malloc(cells->asked_bytes);
    if (l->queries != NULL)
        memset(l->queries, 1, cells->asked_bytes);
}

static void *make(void *context)
{
    const kvp_gpu_cells *cells = context;

    sem_wait(&at_once);
    create_tensor(cells->learner, cells);
    make_room(cells->learner, cells);
    sem_post(&at_once);
    return NULL;
}

static void begin_making(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l != NULL && !l->making && l->codec == NULL)
        l->making = pthread_create(&l->maker, NULL, make, cells) == 0;
}

void kvp_gpu_weigh_begin(kvp_gpu_cells *cells)
{
    if (cells->learner != NULL && cells->learner->n == 0)
        return; /* as good as new */
    kvp_gpu_weigh_free(cells);
    pthread_once(&counted, count_cpus);
    cells->learner = calloc(1, sizeof(*cells->learner));
    if (cells->asked_bytes > 0)
        begin_making(cells);
}

/* NULL without memory. */
static kvp_gpu_learner *learner_of(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l != NULL && l->making)
        pthread_join(l->maker, NULL);
    else if (l != NULL && l->codec == NULL)
        make(cells); /* nothing was planned */
    if (l != NULL)
        l->making = false;
    return l != NULL && l->tensor != NULL ? l : NULL;
}

/* What is in force stays. */
static void end(kvp_gpu_cells *cells)
{
    kvp_gpu_weigh_free(cells);
    cells->weighed = true;
}

/* Cells */

static bool add_plain(struct kvp_gpu_plain *plain, const kvp_gpu_step *step)
{
    const size_t n = plain->n + step->n;

    if (n > plain->most) {
        int64_t *cells = realloc(plain->cells, n * sizeof(*cells));
        int32_t *positions = cells != NULL ? realloc(plain->positions, n * sizeof(*positions)) : NULL;
        plain->cells = cells != NULL ? cells : plain->cells;
        plain->positions = positions != NULL ? positions : plain->positions;
        if (positions == NULL)
            return false;
        plain->most = n;
    }
    for (size_t i = 0; i < step->n; i++) {
        plain->cells[plain->n + i] = step->cells[i];
        plain->positions[plain->n + i] = step->positions != NULL ? step->positions[i] : -1;
    }
    plain->n = n;
    plain->last = step->n;
    return true;
}

/* -sm tensor: a batch is several graphs. */
static bool is_last(const struct kvp_gpu_plain *plain, const kvp_gpu_step *step)
{
    return (int64_t)step->n >= LEAST_ROWS && plain->n >= step->n &&
           memcmp(plain->cells + plain->n - step->n, step->cells, step->n * sizeof(*step->cells)) == 0;
}

static void still_weighing(kvp_gpu_cache *cache)
{
    cache->weighing = false;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cells->weighs && !cells->weighed && cache->plain.n > MOST_PLAIN)
            end(cells);
        cache->weighing = cache->weighing || (cells->weighs && !cells->weighed);
    }
    if (!cache->weighing)
        cache->plain.n = cache->plain.last = 0;
}

bool kvp_gpu_weigh_written(kvp_gpu_cache *cache, const int64_t *cells, size_t n, const kvp_gpu_step *step)
{
    struct kvp_gpu_plain *plain = &cache->plain;

    if (!cache->weighing)
        return true;
    still_weighing(cache);
    if (!cache->weighing)
        return true;
    plain->last = step != NULL && is_last(plain, step) ? n : 0;
    if (plain->last > 0)
        return true;
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < plain->n && cache->held[cells[j] / KVANT_PAGE_TOKENS]; i++)
            if (plain->cells[i] == cells[j])
                plain->cells[i] = -1;
    return step == NULL || (int64_t)n < LEAST_ROWS || add_plain(plain, step);
}

void kvp_gpu_weigh_forget(kvp_gpu_cache *cache)
{
    cache->weighing = cache->weighs;
    cache->plain.n = cache->plain.last = 0;
}

/* Rows */

#define KIND_NUMBERS 128u
#define LEAST_DIFFERENT 192u /* of 1024 tokens */

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* The first layer makes a token's value of the token alone, so its signs tell tokens apart. */
static bool are_alike(const abi_tensor *rows)
{
    const size_t n = (size_t)rows->ne[1], width = (size_t)rows->ne[0];
    uint64_t *hashes = malloc(n * sizeof(*hashes));
    size_t different = 0;

    for (size_t i = 0; i < n && hashes != NULL; i++) {
        const float *row = (const float *)(const void *)((const char *)rows->data + i * rows->nb[1]);
        hashes[i] = 0xcbf29ce484222325u;
        for (size_t j = 0; j < width && j < KIND_NUMBERS; j++)
            hashes[i] = (hashes[i] ^ (uint64_t)(row[j] < 0)) * 0x100000001b3u;
    }
    if (hashes != NULL)
        qsort(hashes, n, sizeof(*hashes), compare);
    for (size_t i = 0; i < n && hashes != NULL; i++)
        different += i == 0 || hashes[i] != hashes[i - 1];
    free(hashes);
    return different * 1024 < n * LEAST_DIFFERENT;
}

/* There are no copies of the rows of the batch that was added last. */
static void drop_batch(kvp_gpu_cache *cache)
{
    pthread_mutex_lock(&cache->gpu->lock);
    cache->plain.n -= cache->plain.last;
    cache->plain.last = 0;
    pthread_mutex_unlock(&cache->gpu->lock);
}

bool kvp_gpu_weigh_wants(kvp_gpu_backend *b, const abi_tensor *node, const abi_tensor *values, bool decodes)
{
    const kvp_gpu_cells *cells = kvp_gpu_cells_of(node);
    abi_tensor copy = { 0 };

    if (!cells->weighs || cells->weighed || node->src[0]->ne[1] < LEAST_ROWS)
        return false;
    if (!b->looked && !decodes)
        b->monotonous = values != NULL && kvp_gpu_fetch(b, KVP_FETCHED_VALUES, values->src[0], &copy) && are_alike(&copy);
    b->looked = true;
    if (!b->monotonous && !decodes)
        return true;
    drop_batch(cells->cache);
    return false;
}

/* As many as will wait: while threads read rows these stay where they are. */
static bool have_rows(kvp_gpu_learner *l, const kvp_gpu_cells *cells, size_t first, size_t n)
{
    const size_t width = kvp_gpu_width(cells), wait = cells->cache->waiting ? cells->cache->most_wait : 0;
    const size_t most = first + n > wait ? first + n : wait;
    float *rows = l->rows;

    if (most > l->most)
        rows = realloc(l->rows, most * width * sizeof(*rows));
    if (rows == NULL)
        return false;
    l->rows = rows;
    l->most = most > l->most ? most : l->most;
    if (first > l->n)
        memset(rows + l->n * width, 0, (first - l->n) * width * sizeof(*rows));
    return true;
}

static bool add_batch(kvp_gpu_cells *cells, const abi_tensor *keys)
{
    kvp_gpu_learner *l = cells->learner;
    struct batch *batch = calloc(1, sizeof(*batch));

    if (batch == NULL)
        return false;
    batch->before = l->last;
    l->last = batch;
    batch->cells = cells;
    batch->n = (size_t)keys->ne[1];
    batch->first = cells->cache->plain.n - batch->n;
    batch->copies = kvp_gpu_copies_of(cells->gpu);
    return batch->copies != NULL && kvp_gpu_copies_stage(cells->gpu, &batch->copies->keys, keys, 1, &batch->keys);
}

bool kvp_gpu_weigh_keys(const abi_tensor *node)
{
    const kvp_kv *kv = kvp_kv_of(node);
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_learner *l = learner_of(cells);
    const abi_tensor *from = node->src[0];
    const size_t n = (size_t)from->ne[1];
    bool ok = l != NULL && cells->cache->plain.n >= n;

    if (ok && l->n > cells->cache->plain.n - n)
        finish(l); /* the same rows once more */
    ok = ok && have_rows(l, cells, cells->cache->plain.n - n, n) && add_batch(cells, from) &&
         (!cells->cache->waiting || kvp_gpu_wait_keep(cells, from));
    if (!ok) {
        kvp_error("%s: no matrix can be learnt from the first rows", kv->name);
        return false;
    }
    if (l->n == 0)
        kvp_rope_tell(kv, l->tensor, from, 1);
    l->n = cells->cache->plain.n;
    return true;
}

/* A layer's thread */

static void note_queries(const struct batch *batch, const char *rows)
{
    const abi_tensor *q = &batch->queries;

    for (size_t s = 0; s < (size_t)q->ne[3]; s++) {
        const kvant_queries queries = { .size = sizeof(queries),
                                        .q = (const float *)(const void *)(rows + s * q->nb[3]),
                                        .token_stride = q->nb[1] / sizeof(float),
                                        .head_stride = q->nb[2] / sizeof(float),
                                        .n_tokens = (uint32_t)q->ne[1],
                                        .n_heads = (uint32_t)q->ne[2],
                                        .positions = batch->asked != NULL ? batch->asked + s * (size_t)q->ne[1] : NULL };
        kvant_tensor_note_queries(batch->cells->learner->tensor, &queries, 1);
    }
}

static float *rows_of(const struct batch *batch)
{
    return batch->cells->learner->rows + batch->first * kvp_gpu_width(batch->cells);
}

static void copy_keys(const struct batch *batch)
{
    const size_t width = kvp_gpu_width(batch->cells);

    for (size_t i = 0; i < batch->n; i++)
        memcpy(rows_of(batch) + i * width, (const char *)batch->keys.data + i * batch->keys.nb[1], width * sizeof(float));
}

/* n of the batch's rows from the first-th on. Rows that are refused are no reason to learn nothing: kernels say so where they matter. */
static void write_tensor(const struct batch *batch, size_t first, size_t n)
{
    const kvp_gpu_cells *cells = batch->cells;
    const size_t width = kvp_gpu_width(cells);
    const int32_t *positions = batch->positions != NULL ? batch->positions + first : NULL;
    kvant_tensor *tensor = cells->learner->tensor;
    int64_t slots[WEIGH_BATCH], at = KVANT_PAGE_TOKENS;

    for (size_t i = 0; i < n; i++)
        slots[i] = positions != NULL && positions[i] < (int32_t)cells->cache->sink_tokens ? (int64_t)(i % KVANT_PAGE_TOKENS) : at++;
    if (positions != NULL)
        kvant_tensor_next_positions(tensor, positions, n);
    kvant_tensor_write(tensor, slots, n, rows_of(batch) + first * width, width, 1);
}

/* Whether the version of the newest rows differs from the one that was asked for last. Its centre is never quite that of another. */
static bool is_new(const kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;
    const size_t d = cells->head_dim;
    bool differs = false;

    for (uint32_t head = 0; head < cells->n_kv_heads; head++) {
        kvant_block_info info = { .size = sizeof(info) };
        if (kvant_tensor_get_block(l->tensor, 1, head, &info) != KVANT_OK || info.affine.center == NULL)
            return false;
        differs = differs || info.version != l->version || memcmp(l->center + head * d, info.affine.center, d * sizeof(float)) != 0;
        memcpy(l->center + head * d, info.affine.center, d * sizeof(float));
        if (head + 1 == cells->n_kv_heads)
            l->version = info.version;
    }
    return differs;
}

/* Codecs of the newest version, unless the next batch's thread makes them, and their numbers. */
static bool make_codecs(const struct batch *batch)
{
    kvp_gpu_cells *cells = batch->cells;
    kvp_gpu_learner *l = cells->learner;
    bool ok;

    if (atomic_load(&batch->followed) || !is_new(cells))
        return true;
    free_made(cells, l);
    ok = (l->made = calloc(cells->n_kv_heads, sizeof(kvant_codec *))) != NULL;
    for (uint32_t head = 0; head < cells->n_kv_heads && ok; head++)
        ok = kvant_tensor_make_codec(l->tensor, 1, head, cells->sources[head], &l->made[head]) == KVANT_OK;
    return ok && (!batch->waits || kvp_gpu_bring_numbers(cells, (const kvant_codec *const *)l->made, NULL));
}

/* Where a batch's queries are copied to; NULL without memory. */
static char *take_room(const kvp_gpu_cells *cells, size_t bytes)
{
    kvp_gpu_learner *l = cells->learner;

    return l->queries != NULL && bytes <= cells->asked_bytes && !atomic_exchange(&l->queries_taken, true) ? l->queries : malloc(bytes);
}

static void give_back(kvp_gpu_learner *l, char *queries)
{
    if (queries == l->queries)
        atomic_store(&l->queries_taken, false);
    else
        free(queries);
}

/* Of the queries; NULL without memory. */
static char *take_copies(const struct batch *batch)
{
    const size_t bytes = kvp_api.nbytes(&batch->queries);
    const bool came = kvp_gpu_enter(batch->cells->gpu) && kvp_cu_ok(kvp_cu.event_finish(batch->copies->copied), "copying");
    char *queries = came ? take_room(batch->cells, bytes) : NULL;

    if (queries != NULL) {
        copy_keys(batch);
        memcpy(queries, batch->queries.data, bytes);
    }
    sem_post(&batch->copies->free);
    return queries;
}

/* queries: copies, or NULL, which is a failure. */
static void learn(struct batch *batch, char *queries)
{
    const size_t n = batch->n, parts = (n + WEIGH_BATCH - 1) / WEIGH_BATCH;

    batch->ok = queries != NULL;
    wait_for(batch->before);
    sem_wait(&at_once);
    if (batch->ok)
        note_queries(batch, queries);
    give_back(batch->cells->learner, queries);
    for (size_t i = 0; i < parts && batch->ok; i++)
        write_tensor(batch, i * n / parts, (i + 1) * n / parts - i * n / parts);
    batch->ok = batch->ok && make_codecs(batch);
    sem_post(&at_once);
}

/* In a thread of its own, which gives way to copies and to those who enqueue work for the GPU. */
static void *learn_apart(void *context)
{
    char *queries = take_copies(context);

    setpriority(PRIO_PROCESS, 0, LOW_PRIORITY); /* the thread's, on Linux */
    learn(context, queries);
    return NULL;
}

/* What a layer's threads learnt */

static bool take_learnt(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;
    bool ok, taken = true;

    finish(l);
    if (l->failed)
        free_made(cells, l);
    if (cells->waits)
        ok = kvp_gpu_store_waiting(cells, l->made);
    else
        ok = l->made == NULL || kvp_gpu_store_anew(cells, l->made, l->rows, l->n, &taken);
    ok = ok && !l->failed;
    free_made(cells, l);
    if (!ok || !taken || l->n >= KVP_ENOUGH_ROWS || !kvant_tensor_wants_queries(l->tensor, 1))
        end(cells);
    return ok;
}

bool kvp_gpu_weigh_join(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;

    if (cells->cache == NULL || cells->cache->waiting || cells->learner == NULL || (cells->learner->last == NULL && !cells->waits) ||
        take_learnt(cells))
        return true;
    kvp_error("%s: no matrix could be learnt from the first rows", kv->name);
    return false;
}

bool kvp_gpu_weigh_settle(kvp_gpu_cache *cache)
{
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors; i++)
        ok = kvp_gpu_weigh_join(cache->tensors[i]) && ok;
    return ok;
}

/* Blocks of few tokens, of first and of recent ones are opened, which may decode them. */
bool kvp_gpu_weigh_later(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    bool later = step->n >= KVP_LEARN_ROWS && cache->recent_tokens == 0 && cache->plain.n <= MOST_PLAIN &&
                 (cache->sink_tokens == 0 || step->positions != NULL);

    for (size_t i = 0; i < step->n && later && cache->sink_tokens > 0; i++)
        later = step->positions[i] >= (int32_t)cache->sink_tokens;
    return later;
}

/* Of so many tokens of one sequence kvant_tensor_note_queries would look at every step-th. */
static size_t step_of_asked(const abi_tensor *q)
{
    const size_t n = (size_t)q->ne[1];

    return q->ne[3] == 1 && n % ASKED_TOKENS == 0 && n > ASKED_TOKENS && (size_t)q->ne[2] * q->nb[2] == q->nb[1] ? n / ASKED_TOKENS : 1;
}

void kvp_gpu_weigh_plan(const abi_tensor *node)
{
    const abi_tensor *q = node->src[0];
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node->src[1]);
    const size_t n = (size_t)(q->ne[1] * q->ne[3]);

    if (cells->learner == NULL || cells->learner->n > 0 || n < (size_t)LEAST_ROWS || cells->asked_bytes > 0 || !kvp_gpu_enter(cells->gpu))
        return;
    cells->asked_bytes = kvp_api.nbytes(q) / step_of_asked(q);
    begin_making(cells);
    pthread_mutex_lock(&cells->gpu->lock);
    kvp_gpu_copies_reserve(cells->gpu, n * kvp_gpu_width(cells) * sizeof(float), cells->asked_bytes);
    pthread_mutex_unlock(&cells->gpu->lock);
}

/* Positions are those of the batch that came last. */
static bool have_batch(kvp_gpu *gpu, const abi_tensor *q, struct batch *batch)
{
    const int32_t *positions = batch->cells->cache->plain.positions + batch->first;
    const size_t bytes = batch->n * sizeof(*positions);
    size_t step = step_of_asked(q);

    if (positions[0] < 0)
        step = 1;
    else if ((batch->positions = malloc(2 * bytes)) == NULL)
        return false;
    if (positions[0] >= 0) {
        batch->asked = batch->positions + batch->n;
        memcpy(batch->positions, positions, bytes);
        for (size_t i = 0; i < batch->n / step; i++)
            batch->asked[i] = positions[i * step];
    }
    return kvp_gpu_copies_stage(gpu, &batch->copies->queries, q, step, &batch->queries) && kvp_gpu_copies_send(gpu, batch->copies);
}

bool kvp_gpu_weigh_queries(kvp_gpu_backend *b, const abi_tensor *node)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node->src[1]);
    struct batch *batch = cells->learner != NULL ? cells->learner->last : NULL;
    const abi_tensor *q = node->src[0];

    if (batch == NULL || batch->begun || batch->n != (size_t)(q->ne[1] * q->ne[3]))
        return true;
    if (!have_batch(b->gpu, q, batch)) {
        kvp_error("%s: no matrix could be learnt from the first rows", kvp_root(node->src[1])->name);
        return false;
    }
    b->gpu->copies_taken = false;
    batch->waits = cells->waits;
    batch->begun = true;
    if (batch->before != NULL)
        atomic_store(&batch->before->followed, true);
    batch->alone = pthread_create(&batch->thread, NULL, learn_apart, batch) == 0;
    if (!batch->alone)
        learn(batch, take_copies(batch));
    /* A centre of other rows, or none, is no measure of these. */
    return cells->weights != NULL || cells->cache->waiting || kvp_gpu_weigh_settle(cells->cache);
}
