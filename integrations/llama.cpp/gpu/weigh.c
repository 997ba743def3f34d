/* weigh.c - matrices of keys from the first rows and queries (transform=first).
 *
 * A tensor in the computer's memory learns, as it does there, from prompts: its matrices are those of a CPU's cache.
 * It keeps several versions. Here there is one: when the tensor makes a better one, the rows that were stored meanwhile take it. Rows of
 * long batches are stored anew from copies, others are decoded first. What comes after 16384 tokens finds the cache as it is. As other
 * rows have to live with a matrix, tokens that are too much alike make none. */
#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"
#include "../rope.h"

#define WEIGH_THREADS 16u
#define LEAST_ROWS ((int64_t)KVP_FEW_TOKENS + 1) /* of a batch: fewer may be in a captured graph */
#define WEIGH_BATCH 512u /* rows that the tensor judges together */
#define ENOUGH_ROWS 1024u /* a batch of 512 costs 16 ms of one CPU per layer of 8 kv heads */
#define MOST_BLOCKS 256u /* that are stored anew */
#define MOST_PLAIN 2048u /* rows in the computer's memory */
#define ROWS_AT_ONCE 2048u

typedef struct kvp_gpu_learner {
    kvant_codec *codec; /* encodes quickly, learns the same */
    kvant_tensor *tensor;
    void *memory;
    float *rows; /* of cells of cache->plain, as far as they came */
    size_t n, most;
    size_t n_waiting; /* the last ones, whose queries are to come */
    uint32_t version; /* of the tensor, that was asked for last, and its centre */
    float *center;
} kvp_gpu_learner;

/* The tensor */

void kvp_gpu_weigh_free(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    cells->learner = NULL;
    if (l == NULL)
        return;
    kvant_tensor_free(&l->tensor);
    kvant_codec_free(&l->codec);
    free(l->memory);
    free(l->center);
    free(l->rows);
    free(l);
}

/* Block 0 is for first tokens of sequences, which are fp16 and not learnt from. */
static bool create_tensor(kvp_gpu_learner *l, const kvp_gpu_cells *cells)
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
    ok = l->memory != NULL && l->center != NULL && kvant_tensor_create(&params, l->memory, &l->tensor) == KVANT_OK;
    free(codecs);
    return ok;
}

static kvp_gpu_learner *learner_of(kvp_gpu_cells *cells)
{
    if (cells->learner != NULL)
        return cells->learner;
    cells->learner = calloc(1, sizeof(*cells->learner));
    if (cells->learner != NULL && !create_tensor(cells->learner, cells))
        kvp_gpu_weigh_free(cells);
    return cells->learner;
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
    for (size_t i = 0; i < plain->n; i++)
        for (size_t j = 0; j < n && plain->cells[i] >= 0; j++)
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

bool kvp_gpu_weigh_keys(kvp_gpu_backend *b, const abi_tensor *node)
{
    const kvp_kv *kv = kvp_kv_of(node);
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_learner *l = learner_of(cells);
    const abi_tensor *from = node->src[0];
    const size_t n = (size_t)from->ne[1], width = kvp_gpu_width(cells), first = cells->cache->plain.n - n;
    abi_tensor copy = { 0 };
    bool ok = l != NULL && cells->cache->plain.n >= n && kvp_gpu_fetch(b, KVP_FETCHED_KEYS, from, &copy);

    if (ok && first + n > l->most) {
        float *rows = realloc(l->rows, (first + n) * width * sizeof(*rows));
        ok = rows != NULL;
        if (ok)
            memset(rows + l->most * width, 0, (first + n - l->most) * width * sizeof(*rows));
        l->rows = ok ? rows : l->rows;
        l->most = ok ? first + n : l->most;
    }
    for (size_t i = 0; i < n && ok; i++)
        memcpy(l->rows + (first + i) * width, (const char *)copy.data + i * from->nb[1], width * sizeof(float));
    if (!ok) {
        kvp_error("%s: no matrix can be learnt from the first rows", kv->name);
        return false;
    }
    if (l->n == 0)
        kvp_rope_tell(kv, l->tensor, from, 1);
    l->n = first + n;
    l->n_waiting = n;
    return true;
}

/* Of cells from the first-th on; NULL: not known. */
static const int32_t *positions_from(const kvp_gpu_cells *cells, size_t first)
{
    const int32_t *positions = cells->cache->plain.positions + first;

    return positions[0] >= 0 ? positions : NULL;
}

static bool note_queries(kvp_gpu_backend *b, const abi_tensor *q, const kvp_gpu_cells *cells)
{
    const kvp_gpu_learner *l = cells->learner;
    const int32_t *positions = positions_from(cells, l->n - l->n_waiting);
    abi_tensor copy = { 0 };
    bool ok = kvp_gpu_fetch(b, KVP_FETCHED_QUERIES, q, &copy);

    for (size_t s = 0; s < (size_t)q->ne[3] && ok; s++) {
        const kvant_queries queries = { .size = sizeof(queries),
                                        .q = (const float *)(const void *)((const char *)copy.data + s * q->nb[3]),
                                        .token_stride = q->nb[1] / sizeof(float),
                                        .head_stride = q->nb[2] / sizeof(float),
                                        .n_tokens = (uint32_t)q->ne[1],
                                        .n_heads = (uint32_t)q->ne[2],
                                        .positions = positions != NULL ? positions + s * (size_t)q->ne[1] : NULL };
        ok = kvant_tensor_note_queries(l->tensor, &queries, WEIGH_THREADS) == KVANT_OK;
    }
    return ok;
}

/* Rows that are refused are no reason to learn nothing: kernels say so where they matter. */
static void write_tensor(const kvp_gpu_cells *cells, size_t first, size_t n)
{
    const kvp_gpu_learner *l = cells->learner;
    const size_t width = kvp_gpu_width(cells);
    const int32_t *positions = positions_from(cells, first);
    int64_t slots[WEIGH_BATCH], at = KVANT_PAGE_TOKENS;

    for (size_t i = 0; i < n; i++)
        slots[i] = positions != NULL && positions[i] < (int32_t)cells->cache->sink_tokens ? (int64_t)(i % KVANT_PAGE_TOKENS) : at++;
    if (positions != NULL)
        kvant_tensor_next_positions(l->tensor, positions, n);
    kvant_tensor_write(l->tensor, slots, n, l->rows + first * width, width, WEIGH_THREADS);
}

/* Another matrix */

/* Where blocks that are stored anew lie: sealed ones, and open ones by their pages. */
struct list {
    bool open;
    uint32_t n, blocks[MOST_BLOCKS];
};

/* False: too many. */
static bool find_blocks(const kvp_gpu_cache *cache, bool open, struct list *list)
{
    *list = (struct list){ .open = open };
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        const int64_t page = kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS);
        if (!cache->held[block] || (open && page < 0))
            continue;
        if (list->n == MOST_BLOCKS)
            return false;
        list->blocks[list->n++] = open ? (uint32_t)page : block;
    }
    return true;
}

static bool decode(const kvp_gpu_cells *cells, const struct list *list, float *room)
{
    const size_t rows = KVANT_PAGE_TOKENS * kvp_gpu_width(cells);
    bool ok = true;

    for (uint32_t i = 0, n; i < list->n && ok; i += n) {
        for (n = 1; i + n < list->n && list->blocks[i + n] == list->blocks[i] + n; n++)
            ;
        ok = kvp_gpu_decode_blocks(cells, list->open, list->blocks[i], n, room + i * rows) == KVANT_OK;
    }
    return ok;
}

/* slots: on the GPU, of so many rows there. */
static bool append(const kvp_gpu_cells *cells, bool open, const float *rows, const int64_t *host_slots, size_t n, int64_t *slots)
{
    bool ok = kvp_gpu_upload(cells->gpu, slots, host_slots, n * sizeof(*slots));

    for (size_t i = 0; i < n && ok; i += ROWS_AT_ONCE)
        ok = kvp_gpu_append(cells, KVANT_ROLE_K, open, rows + i * kvp_gpu_width(cells), n - i < ROWS_AT_ONCE ? n - i : ROWS_AT_ONCE,
                            slots + i) == KVANT_OK;
    return ok && kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "storing rows");
}

static bool append_blocks(const kvp_gpu_cells *cells, const struct list *list, const float *rows, int64_t *slots)
{
    int64_t *host = malloc((list->n + 1) * KVANT_PAGE_TOKENS * sizeof(*host));
    bool ok = host != NULL;

    for (uint32_t i = 0; i < list->n * KVANT_PAGE_TOKENS && ok; i++)
        host[i] = (int64_t)list->blocks[i / KVANT_PAGE_TOKENS] * KVANT_PAGE_TOKENS + i % KVANT_PAGE_TOKENS;
    ok = ok && append(cells, list->open, rows, host, list->n * KVANT_PAGE_TOKENS, slots);
    free(host);
    return ok;
}

/* The kernels' side of a codec with a matrix; it may read the codec as long as it lives. */
static bool have_codecs(kvp_gpu_cells *cells, kvant_codec **made)
{
    char err[512];

    if (cells->codecs[1] != NULL)
        return true;
    cells->made = *made;
    *made = NULL;
    return kvant_cuda_codec_from(cells->made, &cells->codecs[1], err, sizeof(err)) == KVANT_OK &&
           (cells->open_pages.base == NULL || kvant_cuda_codec_create_open(cells->codecs[1], &cells->open_codecs[1]) == KVANT_OK);
}

/* Codecs and numbers of a version. */
static bool take(kvp_gpu_cells *cells, kvant_codec **made)
{
    const bool matrix = kvp_gpu_tables(made[0]).n_weights > 0;

    if (!kvp_gpu_take_numbers(cells, (const kvant_codec *const *)made) || (matrix && !have_codecs(cells, &made[0])))
        return false;
    cells->codec = cells->codecs[matrix];
    cells->open_codec = cells->open_codecs[matrix];
    cells->learnt = true;
    atomic_fetch_add(&cells->gpu->epoch, 1); /* captured graphs know none */
    return true;
}

/* Copies of rows, where they were stored. */
static bool append_plain(const kvp_gpu_cells *cells)
{
    const kvp_gpu_cache *cache = cells->cache;
    const kvp_gpu_learner *l = cells->learner;
    const size_t width = kvp_gpu_width(cells);
    const size_t n = l->n < cache->plain.n ? l->n : cache->plain.n;
    int64_t *slots, *host = malloc((n + 1) * sizeof(*host));
    float *room = kvp_gpu_batch_room(cells->gpu, n, width, &slots);
    bool ok = host != NULL && room != NULL && kvp_gpu_upload(cells->gpu, room, l->rows, n * width * sizeof(*room)) &&
              append(cells, false, room, cache->plain.cells, n, slots);

    for (size_t i = 0; i < n && ok; i++) {
        const int64_t cell = cache->plain.cells[i], page = cell >= 0 ? kvp_gpu_page_of(cache, cell) : -1;
        host[i] = page >= 0 ? page * KVANT_PAGE_TOKENS + cell % KVANT_PAGE_TOKENS : -1;
    }
    ok = ok && (cells->open_pages.base == NULL || append(cells, true, room, host, n, slots));
    free(host);
    return ok;
}

/* All rows from the version in force to this one. The lock is held. */
static bool change(kvp_gpu_cells *cells, kvant_codec **made, const struct list lists[2])
{
    const size_t width = kvp_gpu_width(cells), sealed = lists[0].n * KVANT_PAGE_TOKENS, n = sealed + lists[1].n * KVANT_PAGE_TOKENS;
    int64_t *slots;
    float *room = kvp_gpu_batch_room(cells->gpu, n, width, &slots);
    const bool open = cells->open_pages.base != NULL;
    bool ok = room != NULL && decode(cells, &lists[0], room) && (!open || decode(cells, &lists[1], room + sealed * width)) &&
              kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "decoding rows") && take(cells, made);

    ok = ok && append_blocks(cells, &lists[0], room, slots) &&
         (!open || append_blocks(cells, &lists[1], room + sealed * width, slots)) && append_plain(cells);
    kvp_gpu_take_word(cells->gpu->refused); /* of cells that hold nothing, or as when they were stored first */
    return ok;
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

static bool make_codecs(const kvp_gpu_cells *cells, kvant_codec **made)
{
    for (uint32_t head = 0; head < cells->n_kv_heads; head++)
        if (kvant_tensor_make_codec(cells->learner->tensor, 1, head, cells->sources[head], &made[head]) != KVANT_OK)
            return false;
    return true;
}

/* Where too many rows were stored already, what is in force stays. */
static bool follow(kvp_gpu_cells *cells)
{
    struct list *lists = malloc(2 * sizeof(*lists));
    kvant_codec **made = calloc(cells->n_kv_heads, sizeof(*made));
    bool ok = lists != NULL && made != NULL;

    if (ok && find_blocks(cells->cache, false, &lists[0]) && find_blocks(cells->cache, true, &lists[1]))
        ok = make_codecs(cells, made) && change(cells, made, lists);
    else if (ok)
        end(cells);
    for (uint32_t head = 0; made != NULL && head < cells->n_kv_heads; head++)
        kvant_codec_free(&made[head]);
    free(made);
    free(lists);
    return ok;
}

/* Rows of a batch, whose queries are noted. */
static bool learn(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;
    const size_t n = l->n_waiting, parts = (n + WEIGH_BATCH - 1) / WEIGH_BATCH, first = l->n - n;
    bool ok = true;

    l->n_waiting = 0;
    for (size_t i = 0; i < parts; i++)
        write_tensor(cells, first + i * n / parts, (i + 1) * n / parts - i * n / parts);
    if (is_new(cells))
        ok = follow(cells);
    if (ok && cells->learner != NULL && (l->n >= ENOUGH_ROWS || !kvant_tensor_wants_queries(l->tensor, 1)))
        end(cells);
    return ok;
}

bool kvp_gpu_weigh_queries(kvp_gpu_backend *b, const abi_tensor *node)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node->src[1]);
    const abi_tensor *q = node->src[0];
    bool ok;

    if (cells->learner == NULL || cells->learner->n_waiting == 0 || cells->learner->n_waiting != (size_t)(q->ne[1] * q->ne[3]))
        return true;
    pthread_mutex_lock(&cells->gpu->lock);
    ok = note_queries(b, q, cells) && learn(cells);
    pthread_mutex_unlock(&cells->gpu->lock);
    if (!ok)
        kvp_error("%s: no matrix could be learnt from the first rows", kvp_root(node->src[1])->name);
    return ok;
}
