/* weigh.c - matrices of keys from the first rows and queries (transform=first).
 *
 * A tensor in the computer's memory learns, as it does there, from prompts, and from decoded tokens (decoded.c): its matrices are those of
 * a CPU's cache.
 * It keeps several versions. Here there is one, and others for later positions (ranges.c): when the tensor makes a better one, the rows
 * that were stored meanwhile take it (anew.c). What comes after 16384 tokens finds the cache as it is. As other rows have to live with a
 * matrix, tokens that are too much alike make none.
 *
 * Keys of first batches wait for the matrix of the last of these (wait.c); later a layer's matrix is in force from the next graph on. So
 * results depend on no clock, though threads learn while the GPU goes on (learner.c). */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

#define ASKED_TOKENS 64u /* of a batch, whose queries kvant_tensor_note_queries looks at; of 1024 tokens it would at twice as many */
#define LEAST_ROWS ((int64_t)KVP_FEW_TOKENS + 1) /* of a batch: fewer may be in a captured graph */
#define MOST_PLAIN 2048u /* rows in the computer's memory */

/* What is in force stays. */
static void end(kvp_gpu_cells *cells)
{
    const kvp_gpu_cache *cache = cells->cache;
    const bool more = cache->n_blocks / cache->n_streams * KVANT_PAGE_TOKENS > KVP_FIRST_RANGE;

    if (cells->learner != NULL && cells->n_weights > cells->head_dim && more)
        kvp_gpu_learner_keep(cells, cells->learner);
    else
        kvp_gpu_weigh_free(cells);
    cells->weighed = true;
}

/* Cells */

bool kvp_gpu_weigh_add(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    struct kvp_gpu_plain *plain = &cache->plain;
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

bool kvp_gpu_cells_end_with(const int64_t *cells, size_t n, const kvp_gpu_step *step)
{
    return n >= step->n && memcmp(cells + n - step->n, step->cells, step->n * sizeof(*cells)) == 0;
}

void kvp_gpu_cells_lose(const kvp_gpu_cache *cache, int64_t *cells, size_t n, const int64_t *written, size_t n_written)
{
    for (size_t j = 0; j < n_written; j++)
        for (size_t i = 0; i < n && cache->written[written[j] / KVANT_PAGE_TOKENS] != 0; i++)
            if (cells[i] == written[j])
                cells[i] = -1;
}

/* Rows behind the first range wait for matrices of later ones, where the first one is not for them. */
static bool has_enough(const kvp_gpu_cells *cells)
{
    const bool first = cells->learner != NULL && cells->learner->begins && cells->n_weights > cells->head_dim;

    return cells->cache->plain.n > MOST_PLAIN || (first && !kvp_gpu_in_first_range(cells->cache));
}

static void still_weighing(kvp_gpu_cache *cache)
{
    cache->weighing = false;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cells->weighs && !cells->weighed && has_enough(cells))
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
    plain->last = step != NULL && (int64_t)n >= LEAST_ROWS && kvp_gpu_cells_end_with(plain->cells, plain->n, step) ? n : 0;
    if (plain->last > 0)
        return true;
    kvp_gpu_cells_lose(cache, plain->cells, plain->n, cells, n);
    return step == NULL || (int64_t)n < LEAST_ROWS || kvp_gpu_weigh_add(cache, step);
}

void kvp_gpu_weigh_forget(kvp_gpu_cache *cache)
{
    kvp_gpu_decoded_forget(cache);
    cache->weighing = cache->weighs;
    cache->plain.n = cache->plain.last = 0;
}

/* Rows */

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
        for (size_t j = 0; j < width && j < KVP_KIND_NUMBERS; j++)
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

    if (!cells->weighs || cells->weighed || node->src[0]->ne[1] < LEAST_ROWS || cells->cache->plain.last == 0)
        return false;
    if (!b->looked && !decodes)
        b->monotonous = values != NULL && kvp_gpu_fetch(b, KVP_FETCHED_VALUES, values->src[0], &copy) && are_alike(&copy);
    b->looked = true;
    if (!b->monotonous && !decodes)
        return true;
    drop_batch(cells->cache);
    return false;
}

bool kvp_gpu_weigh_keys(const abi_tensor *node)
{
    const kvp_kv *kv = kvp_kv_of(node);
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_learner *l = kvp_gpu_learner_of(cells);
    const abi_tensor *from = node->src[0];
    const size_t n = (size_t)from->ne[1];
    bool ok = l != NULL && cells->cache->plain.n >= n;

    if (ok && l->n > cells->cache->plain.n - n)
        kvp_gpu_learner_finish(l); /* the same rows once more */
    ok = ok && kvp_gpu_learner_add(cells, from) && (!cells->cache->waiting || kvp_gpu_wait_keep(cells, from));
    if (!ok) {
        kvp_error("%s: no matrix can be learnt from the first rows", kv->name);
        return false;
    }
    kvp_gpu_learner_tell(l, kv, from);
    l->n = cells->cache->plain.n;
    return true;
}

/* What a layer's threads learnt */

static bool take_learnt(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;
    bool ok, taken = true;

    kvp_gpu_learner_finish(l);
    if (l->failed)
        kvp_gpu_learner_drop(cells, l);
    if (cells->waits)
        ok = kvp_gpu_store_waiting(cells, &l->made);
    else
        ok = l->made.codecs == NULL || kvp_gpu_store_anew(cells, &l->made, l->rows, l->n, &taken);
    ok = ok && !l->failed;
    kvp_gpu_learner_drop(cells, l);
    if (!ok || !taken || l->n >= KVP_ENOUGH_ROWS || !kvant_tensor_wants_queries(l->tensor, 2))
        end(cells);
    return ok;
}

bool kvp_gpu_weigh_join(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;

    if (cells->cache == NULL || cells->cache->waiting || cells->cache->decoded.pends || cells->learner == NULL ||
        (cells->learner->last == NULL && !cells->waits) || take_learnt(cells))
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

/* A step that gives up pages or opens blocks with rows needs the matrices before its graph. */
bool kvp_gpu_weigh_later(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    return step->n >= KVP_LEARN_ROWS && cache->plain.n <= MOST_PLAIN &&
           (!cache->keeps || kvp_gpu_opens_empty(cache, step));
}

/* Of so many tokens of one sequence kvant_tensor_note_queries would look at every step-th. */
static size_t step_of_asked(const abi_tensor *q)
{
    const size_t n = (size_t)q->ne[1];

    return q->ne[3] == 1 && n % ASKED_TOKENS == 0 && n > ASKED_TOKENS && (size_t)q->ne[2] * q->nb[2] == q->nb[1] ? n / ASKED_TOKENS : 1;
}

void kvp_gpu_weigh_plan(kvp_gpu_cells *cells, const abi_tensor *q)
{
    const size_t n = (size_t)(q->ne[1] * q->ne[3]);

    if (cells->learner == NULL || cells->learner->n > 0 || n < (size_t)LEAST_ROWS || cells->asked_bytes > 0 || !kvp_gpu_enter(cells->gpu))
        return;
    cells->asked_bytes = kvp_api.nbytes(q) / step_of_asked(q);
    kvp_gpu_learner_make(cells);
    pthread_mutex_lock(&cells->gpu->lock);
    kvp_gpu_copies_reserve(cells->gpu, n * kvp_gpu_width(cells) * sizeof(float), cells->asked_bytes);
    pthread_mutex_unlock(&cells->gpu->lock);
}

/* Positions are those of the batch that came last. */
static bool have_batch(kvp_gpu *gpu, const abi_tensor *q, struct kvp_gpu_batch *batch)
{
    const int32_t *positions = batch->cells->cache->plain.positions + batch->first;
    const size_t bytes = batch->n * sizeof(*positions);
    const bool known = positions[0] >= 0;
    const size_t step = known ? step_of_asked(q) : 1;

    if (known && (batch->positions = malloc(2 * bytes)) == NULL)
        return false;
    if (known) {
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
    struct kvp_gpu_batch *batch = cells->learner != NULL ? cells->learner->last : NULL;
    const abi_tensor *q = node->src[0];

    if (batch == NULL || batch->begun || batch->n != (size_t)(q->ne[1] * q->ne[3]))
        return true;
    if (!have_batch(b->gpu, q, batch)) {
        kvp_error("%s: no matrix could be learnt from the first rows", kvp_root(node->src[1])->name);
        return false;
    }
    b->gpu->copies_taken = false;
    batch->waits = cells->waits;
    kvp_gpu_learner_start(batch);
    /* A centre of other rows, or none, is no measure of these. */
    return cells->weights != NULL || cells->cache->waiting || kvp_gpu_weigh_settle(cells->cache);
}
