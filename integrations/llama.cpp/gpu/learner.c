/* learner.c - see learner.h.
 *
 * Each batch has a thread, which learns after that of the batch before, at a low priority. One CPU is left to the GPU's caller. */
#define _POSIX_C_SOURCE 200809L /* sigset_t */
#include "learner.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "../ggml_api.h"
#include "../rope.h"

#define MOST_AT_ONCE 7 /* layers: more disturb the GPU's caller, and are not needed before a wait ends */
#define LOW_PRIORITY 10
#define WEIGH_BATCH 512u /* rows that the tensor judges together */

static pthread_once_t counted = PTHREAD_ONCE_INIT;
static sem_t at_once;

static void count_cpus(void)
{
    const uint32_t n = kvant_available_cpus() - 1;

    sem_init(&at_once, 0, n < 1 ? 1 : n > MOST_AT_ONCE ? MOST_AT_ONCE : n);
}

/* A handler of the program's may interrupt the wait, which is then no permit to learn. */
static void take_permit(void)
{
    while (sem_wait(&at_once) != 0)
        ;
}

static void return_permit(void)
{
    sem_post(&at_once);
}

/* A thread starts with its creator's signal mask. This one blocks signals, because the program's
 * handlers belong on the program's threads. A fault's signal goes to the thread that has it. */
static bool start_thread(pthread_t *thread, void *(*run)(void *), void *context)
{
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL };
    sigset_t blocked, former;
    bool started;

    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &former);
    started = pthread_create(thread, NULL, run, context) == 0;
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    return started;
}

void kvp_gpu_learner_drop(const kvp_gpu_cells *cells, kvp_gpu_learner *l)
{
    kvp_gpu_free_codecs(l->made.codecs, cells->n_kv_heads);
    free(l->made.start);
    l->made = (kvp_gpu_version){ 0 };
}

/* Waits for the thread of a batch, which waits for those before it. */
static void wait_for(struct kvp_gpu_batch *batch)
{
    while (batch != NULL && !batch->begun)
        batch = batch->before;
    if (batch != NULL && batch->alone)
        pthread_join(batch->thread, NULL);
    if (batch != NULL)
        batch->alone = false;
}

/* Waits for the layer's threads. */
void kvp_gpu_learner_finish(kvp_gpu_learner *l)
{
    wait_for(l->last);
    while (l->last != NULL) {
        struct kvp_gpu_batch *batch = l->last;
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
    atomic_store(&l->dropped, true);
    if (l->making)
        pthread_join(l->maker, NULL);
    kvp_gpu_learner_finish(l); /* threads find it in cells */
    cells->learner = NULL;
    kvp_gpu_learner_drop(cells, l);
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

    take_permit();
    create_tensor(cells->learner, cells);
    make_room(cells->learner, cells);
    return_permit();
    return NULL;
}

void kvp_gpu_learner_make(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l != NULL && !l->making && l->codec == NULL)
        l->making = start_thread(&l->maker, make, cells);
}

void kvp_gpu_weigh_begin(kvp_gpu_cells *cells)
{
    if (cells->learner != NULL && cells->learner->n == 0)
        return; /* as good as new */
    kvp_gpu_weigh_free(cells);
    pthread_once(&counted, count_cpus);
    cells->learner = calloc(1, sizeof(*cells->learner));
    if (cells->asked_bytes > 0)
        kvp_gpu_learner_make(cells);
}

/* NULL without memory. */
kvp_gpu_learner *kvp_gpu_learner_of(kvp_gpu_cells *cells)
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

/* As many as will wait: while threads read rows these stay where they are. */
static bool have_rows(kvp_gpu_learner *l, const kvp_gpu_cells *cells, size_t first, size_t n)
{
    const size_t width = kvp_gpu_width(cells), wait = cells->cache->waiting ? cells->cache->most_learnt : 0;
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

bool kvp_gpu_learner_add(kvp_gpu_cells *cells, const abi_tensor *keys)
{
    kvp_gpu_learner *l = cells->learner;
    const size_t n = (size_t)keys->ne[1], first = cells->cache->plain.n - n;
    struct kvp_gpu_batch *batch = have_rows(l, cells, first, n) ? calloc(1, sizeof(*batch)) : NULL;

    if (batch == NULL)
        return false;
    *batch = (struct kvp_gpu_batch){ .before = l->last, .cells = cells, .first = first, .n = n };
    l->last = batch;
    batch->copies = kvp_gpu_copies_of(cells->gpu);
    return batch->copies != NULL && kvp_gpu_copies_stage(cells->gpu, &batch->copies->keys, keys, 1, &batch->keys);
}

bool kvp_gpu_learner_learn(kvp_gpu_cells *cells, const abi_tensor *keys, const abi_tensor *queries, const int32_t *positions, cu_event ready)
{
    kvp_gpu_learner *l = kvp_gpu_learner_of(cells);
    const struct kvp_gpu_plain *plain = &cells->cache->plain;
    const size_t n = (size_t)keys->ne[1], first = plain->n - n, n_asked = (size_t)queries->ne[1];
    struct kvp_gpu_batch *batch = l != NULL && have_rows(l, cells, first, n) ? calloc(1, sizeof(*batch)) : NULL;
    int32_t *all = malloc((n + n_asked) * sizeof(*all));

    if (batch == NULL || all == NULL) {
        free(batch);
        free(all);
        return false;
    }
    memcpy(all, plain->positions + first, n * sizeof(*all));
    memcpy(all + n, positions, n_asked * sizeof(*all));
    *batch = (struct kvp_gpu_batch){ .before = l->last, .cells = cells, .ready = ready, .keys = *keys, .queries = *queries,
                                     .positions = all, .asked = all + n, .first = first, .n = n };
    l->last = batch;
    l->n = plain->n;
    kvp_gpu_learner_start(batch);
    return true;
}

void kvp_gpu_learner_tell(kvp_gpu_learner *l, const kvp_kv *kv, const abi_tensor *rows)
{
    const kvp_gpu_cells *cells = kv->cells;
    const uint32_t all = kvp_kv_n_positions(kv), first = (uint32_t)kvp_gpu_range_at(1).from;

    if (l->told)
        return;
    l->told = true;
    l->begins = kvp_gpu_in_first_range(cells->cache);
    l->turns = kvp_gpu_centers_tell(kv, rows);
    l->turns = kvp_rope_tell(kv, l->tensor, rows, l->begins && all > first ? first : all, 1, l->turns) && l->turns;
}

/* A batch's thread */

static void note_queries(const struct kvp_gpu_batch *batch, const char *rows)
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

static float *rows_of(const struct kvp_gpu_batch *batch)
{
    return batch->cells->learner->rows + batch->first * kvp_gpu_width(batch->cells);
}

static void copy_keys(const struct kvp_gpu_batch *batch)
{
    const size_t width = kvp_gpu_width(batch->cells);

    for (size_t i = 0; i < batch->n; i++)
        memcpy(rows_of(batch) + i * width, (const char *)batch->keys.data + i * batch->keys.nb[1], width * sizeof(float));
}

/* n of the batch's rows from the first-th on. Rows that are refused are no reason to learn nothing: kernels say so where they matter. */
static void write_tensor(const struct kvp_gpu_batch *batch, size_t first, size_t n)
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
        differs = differs || info.version != l->number || memcmp(l->center + head * d, info.affine.center, d * sizeof(float)) != 0;
        memcpy(l->center + head * d, info.affine.center, d * sizeof(float));
        if (head + 1 == cells->n_kv_heads)
            l->number = info.version;
    }
    return differs;
}

/* Room for one of a layer's; false without memory. */
static bool have_version(const kvp_gpu_cells *cells, kvp_gpu_version *version)
{
    *version = (kvp_gpu_version){ calloc(cells->n_kv_heads, sizeof(*version->codecs)), NULL };
    if (version->codecs != NULL && cells->learner->turns)
        version->start = calloc(kvp_gpu_width(cells), sizeof(*version->start));
    return version->codecs != NULL && (version->start != NULL || !cells->learner->turns);
}

static bool read_version(const kvp_gpu_cells *cells, uint32_t head, kvp_gpu_version *version)
{
    const kvant_tensor *tensor = cells->learner->tensor;
    kvant_block_info info = { .size = sizeof(info) };
    const size_t d = cells->head_dim;

    if (kvant_tensor_get_block(tensor, 1, head, &info) != KVANT_OK || (info.start == NULL && version->start != NULL))
        return false;
    if (version->start != NULL)
        memcpy(version->start + head * d, info.start, d * sizeof(*info.start));
    return kvant_tensor_make_codec(tensor, 1, head, cells->sources[head], &version->codecs[head]) == KVANT_OK;
}

/* Of the newest version, unless the next batch's thread makes them, and its numbers. */
static bool make_codecs(const struct kvp_gpu_batch *batch)
{
    kvp_gpu_cells *cells = batch->cells;
    kvp_gpu_learner *l = cells->learner;
    bool ok;

    if (atomic_load(&batch->followed) || !is_new(cells))
        return true;
    kvp_gpu_learner_drop(cells, l);
    ok = have_version(cells, &l->made);
    for (uint32_t head = 0; head < cells->n_kv_heads && ok; head++)
        ok = read_version(cells, head, &l->made);
    return ok && (!batch->waits || kvp_gpu_bring_numbers(cells, (const kvant_codec *const *)l->made.codecs, l->made.start, NULL));
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

static bool bring(const struct kvp_gpu_batch *batch, const abi_tensor *from, void *to)
{
    return kvp_cu_ok(kvp_cu.copy_out(to, (cu_address)(uintptr_t)from->data, kvp_api.nbytes(from), batch->cells->gpu->copying), "copying");
}

static bool bring_halves(const struct kvp_gpu_batch *batch, float *to)
{
    const abi_tensor *from = &batch->keys;
    uint16_t *halves = malloc(kvp_api.nbytes(from));
    const bool ok = halves != NULL && bring(batch, from, halves) &&
                    kvp_cu_ok(kvp_cu.stream_finish(batch->cells->gpu->copying), "copying");

    if (ok)
        kvp_api.fp16_to_fp32_row(halves, to, from->ne[0] * from->ne[1]);
    free(halves);
    return ok;
}

static bool bring_keys(const struct kvp_gpu_batch *batch)
{
    return batch->keys.type == ABI_TYPE_F16 ? bring_halves(batch, rows_of(batch)) : bring(batch, &batch->keys, rows_of(batch));
}

/* The same from GPU memory. Its caller has other things to do than to wait for copies. */
static char *bring_rows(const struct kvp_gpu_batch *batch)
{
    char *queries = malloc(kvp_api.nbytes(&batch->queries));

    if (queries != NULL && kvp_gpu_enter(batch->cells->gpu) && kvp_cu_ok(kvp_cu.event_finish(batch->ready), "copying") &&
        bring_keys(batch) && bring(batch, &batch->queries, queries) &&
        kvp_cu_ok(kvp_cu.stream_finish(batch->cells->gpu->copying), "copying"))
        return queries;
    free(queries);
    return NULL;
}

/* Of the queries; NULL without memory. */
static char *take_copies(const struct kvp_gpu_batch *batch)
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

static char *take(const struct kvp_gpu_batch *batch)
{
    return batch->copies != NULL ? take_copies(batch) : bring_rows(batch);
}

/* queries: copies, or NULL, which is a failure. */
static void learn(struct kvp_gpu_batch *batch, char *queries)
{
    const size_t n = batch->n, parts = (n + WEIGH_BATCH - 1) / WEIGH_BATCH;

    wait_for(batch->before);
    take_permit();
    batch->ok = queries != NULL && !atomic_load(&batch->cells->learner->dropped);
    if (batch->ok)
        note_queries(batch, queries);
    give_back(batch->cells->learner, queries);
    for (size_t i = 0; i < parts && batch->ok; i++)
        write_tensor(batch, i * n / parts, (i + 1) * n / parts - i * n / parts);
    batch->ok = batch->ok && make_codecs(batch);
    return_permit();
}

/* In a thread of its own, which gives way to copies and to those who enqueue work for the GPU. */
static void *learn_apart(void *context)
{
    char *queries = take(context);

    setpriority(PRIO_PROCESS, 0, LOW_PRIORITY); /* the thread's, on Linux */
    learn(context, queries);
    return NULL;
}

void kvp_gpu_learner_start(struct kvp_gpu_batch *batch)
{
    batch->begun = true;
    if (batch->before != NULL)
        atomic_store(&batch->before->followed, true);
    batch->alone = start_thread(&batch->thread, learn_apart, batch);
    if (!batch->alone)
        learn(batch, take(batch));
}

/* Later ranges */

void kvp_gpu_learner_keep(const kvp_gpu_cells *cells, kvp_gpu_learner *l)
{
    kvp_gpu_learner_finish(l);
    kvp_gpu_learner_drop(cells, l);
    free(l->rows);
    free(l->queries);
    l->rows = NULL;
    l->queries = NULL;
    l->most = 0;
}

/* Layers without blocks' centres have none. */
static bool find_centers(const kvp_gpu_learner *l, float *start, float *mean)
{
    return start == NULL || (kvant_tensor_range_center(l->tensor, 0, KVANT_PAGE_TOKENS - 1, start) == KVANT_OK &&
                             kvant_tensor_range_center(l->tensor, l->range.first, l->range.last, mean) == KVANT_OK);
}

static void *make_range(void *context)
{
    kvp_gpu_cells *cells = context;
    kvp_gpu_learner *l = cells->learner;
    float *mean = calloc(kvp_gpu_width(cells), sizeof(*mean));
    kvp_gpu_version version;
    const bool room = have_version(cells, &version) && mean != NULL;

    setpriority(PRIO_PROCESS, 0, LOW_PRIORITY);
    take_permit();
    l->made_range = room && kvp_gpu_enter(cells->gpu) && find_centers(l, version.start, mean) &&
                    kvant_tensor_make_range_codecs(l->tensor, l->range.first, l->range.last, KVANT_PAGE_TOKENS, cells->sources,
                                                   version.codecs, 1) == KVANT_OK &&
                    kvp_gpu_bring_range(cells, l->range.number, &version, mean);
    return_permit();
    kvp_gpu_free_codecs(version.codecs, cells->n_kv_heads);
    free(version.start);
    free(mean);
    return NULL;
}

bool kvp_gpu_learner_ask(kvp_gpu_cells *cells, const kvp_gpu_range *range)
{
    kvp_gpu_learner *l = cells->learner;

    if (l == NULL || l->tensor == NULL || l->making || cells->cache->ranges.centers.uneven || cells->cache->ranges.centers.rope.size == 0)
        return false;
    l->range = *range;
    l->made_range = false;
    l->making = start_thread(&l->maker, make_range, cells);
    return l->making;
}

bool kvp_gpu_learner_answer(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l == NULL || !l->making)
        return true;
    pthread_join(l->maker, NULL);
    l->making = false;
    cells->further_made |= (uint32_t)l->made_range << l->range.number;
    return l->made_range;
}
