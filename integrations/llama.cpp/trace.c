/* trace.c - see trace.h. Rows of a graph have no line until attention brings the mask. llama.cpp
 * may restore a state cell by cell. So rows that are written outside of graphs have no line until
 * something else happens, and become one line. */
#include "trace.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"
#include "log.h"

#define HIDDEN 0xfc00u /* minus infinity in a mask */

/* Rows that have no line yet. */
struct pending {
    char kind;        /* 's' or 'w' */
    bool placed;      /* positions are known */
    int64_t *cells;   /* numbered over all streams */
    int64_t *numbers; /* positions, and behind them scratch for one stream's slots and positions */
    size_t n, room;
};

struct cache {
    struct cache *next;
    const void *buffer;
    const kvp_kv *keys; /* the tensor whose calls are recorded */
    unsigned id;
    uint64_t step;
    struct pending pending;
};

bool kvp_trace_is_on;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;
static struct cache *caches;
static unsigned n_ids;

/* Lines */

static void stop(const char *why)
{
    if (file == NULL)
        return;
    kvp_error("warning: KVANT_TRACE=%s: %s; the trace ends here", kvant_os_variable("KVANT_TRACE"),
              why);
    fclose(file);
    file = NULL;
}

/* The number of values from values[0] on that follow each other by *step, which is 0 or 1. */
static size_t run_length(const int64_t *values, size_t n, int64_t *step)
{
    size_t i = 1;

    *step = n > 1 && values[1] == values[0] ? 0 : 1;
    while (i < n && values[i] == values[i - 1] + *step)
        i++;
    return i;
}

static void put_list(const int64_t *values, size_t n)
{
    int64_t step;

    if (n == 0)
        fputs(" -", file);
    for (size_t i = 0, length; i < n; i += length) {
        length = run_length(values + i, n - i, &step);
        fprintf(file, "%c%" PRId64 "%c%zu", i == 0 ? ' ' : ',', values[i], step == 0 ? '*' : '+',
                length);
    }
}

static void put_head(const struct cache *cache, char kind, uint32_t stream, uint32_t n_kv)
{
    fprintf(file, "%c %u %" PRIu64 " %" PRIu32 " %" PRIu32, kind, cache->id, cache->step, stream,
            n_kv);
}

/* Every line reaches the system at once, because a server ends by a signal. */
static void end_line(void)
{
    fputc('\n', file);
    if (fflush(file) != 0)
        stop(strerror(errno));
}

static void put_line(const struct cache *cache, char kind, uint32_t stream, uint32_t n_kv)
{
    if (file == NULL)
        return;
    put_head(cache, kind, stream, n_kv);
    fputs(" - - -", file);
    end_line();
}

/* Pending rows */

static bool reserve(struct pending *pending, size_t n)
{
    const size_t room = n > 2 * pending->room ? n : 2 * pending->room;
    int64_t *cells, *numbers;

    if (n <= pending->room)
        return true;
    cells = realloc(pending->cells, room * sizeof(*cells));
    if (cells != NULL)
        pending->cells = cells;
    numbers = realloc(pending->numbers, 3 * room * sizeof(*numbers));
    if (numbers != NULL)
        pending->numbers = numbers;
    if (cells == NULL || numbers == NULL) {
        stop("out of memory");
        return false;
    }
    pending->room = room;
    return true;
}

/* Moves the rows of a stream from the pending rows to the scratch; returns their number. */
static size_t take_stream(struct cache *cache, size_t stream)
{
    struct pending *pending = &cache->pending;
    int64_t *slots = pending->numbers + pending->room, *positions = slots + pending->room;
    const size_t n_cells = cache->keys->shape.n_cells;
    size_t taken = 0, left = 0;

    for (size_t i = 0; i < pending->n; i++) {
        const size_t cell = (size_t)pending->cells[i];
        if (cell / n_cells == stream) {
            slots[taken] = (int64_t)(cell % n_cells);
            positions[taken++] = pending->numbers[i];
        } else {
            pending->cells[left] = pending->cells[i];
            pending->numbers[left++] = pending->numbers[i];
        }
    }
    pending->n = left;
    return taken;
}

/* Writes the line of a stream's pending rows. visible: n_visible cells, ascending. */
static void put_rows(struct cache *cache, size_t stream, uint32_t n_kv, const int64_t *visible,
                     size_t n_visible)
{
    struct pending *pending = &cache->pending;
    const size_t n = pending->n > 0 ? take_stream(cache, stream) : 0;

    if (file == NULL)
        return;
    put_head(cache, pending->kind, (uint32_t)stream, n_kv);
    put_list(pending->numbers + pending->room, n);
    put_list(pending->numbers + 2 * pending->room, pending->placed ? n : 0);
    put_list(visible, n_visible);
    end_line();
}

/* Writes the lines for rows whose attention was not seen, and for rows written outside of
 * graphs. */
static void flush(struct cache *cache)
{
    const size_t n_cells = cache->keys->shape.n_cells;

    while (cache->pending.n > 0)
        put_rows(cache, (size_t)cache->pending.cells[0] / n_cells, 0, NULL, 0);
}

/* Caches */

static struct cache *find(const void *buffer)
{
    struct cache *cache = caches;

    while (cache != NULL && cache->buffer != buffer)
        cache = cache->next;
    return cache;
}

static struct cache *add(const kvp_kv *kv)
{
    struct cache *cache = calloc(1, sizeof(*cache));

    if (cache == NULL) {
        stop("out of memory");
        return NULL;
    }
    *cache = (struct cache){ .next = caches, .buffer = kv->cache, .keys = kv, .id = ++n_ids };
    caches = cache;
    put_line(cache, 'o', kv->shape.n_streams, kv->shape.n_cells);
    return cache;
}

/* The cache of a tensor; NULL where another tensor's calls are recorded. */
static struct cache *of_keys(const kvp_kv *kv)
{
    struct cache *cache;

    if (file == NULL || kv->shape.role != KVANT_ROLE_K || kv->remote != NULL)
        return NULL;
    cache = find(kv->cache);
    if (cache == NULL)
        cache = add(kv);
    return cache != NULL && cache->keys == kv ? cache : NULL;
}

/* The functions of trace.h */

void kvp_trace_open(void)
{
    const char *path = kvant_os_variable("KVANT_TRACE");

    pthread_mutex_lock(&lock);
    if (path != NULL && path[0] != '\0' && file == NULL) {
        file = kvp_host_open(path, true);
        kvp_trace_is_on = file != NULL;
        if (file == NULL)
            kvp_error("warning: KVANT_TRACE=%s: %s; nothing is recorded", path, strerror(errno));
        else if (fputs("kvant-trace 1", file) != EOF)
            end_line();
    }
    pthread_mutex_unlock(&lock);
}

void kvp_trace_rows(const kvp_kv *kv, const int64_t *cells, size_t n, const int32_t *positions)
{
    struct cache *cache;

    pthread_mutex_lock(&lock);
    cache = of_keys(kv);
    if (cache != NULL) {
        flush(cache);
        cache->step++;
        if (reserve(&cache->pending, n)) {
            struct pending *pending = &cache->pending;
            pending->kind = 's';
            pending->placed = positions != NULL;
            pending->n = n;
            for (size_t i = 0; i < n; i++) {
                pending->cells[i] = cells[i];
                pending->numbers[i] = positions != NULL ? positions[i] : 0;
            }
        }
    }
    pthread_mutex_unlock(&lock);
}

/* The last query comes first, because it sees most cells in a causal mask. */
static bool is_seen(const kvant_attention_problem *problem, uint32_t cell)
{
    if (problem->mask == NULL)
        return true;
    for (uint32_t query = problem->n_queries; query-- > 0;)
        if (problem->mask[query * problem->mask_token_stride + cell] != HIDDEN)
            return true;
    return false;
}

void kvp_trace_attention(const kvp_kv *kv, size_t stream, const kvant_attention_problem *problem)
{
    int64_t *visible = malloc((problem->n_tokens + (size_t)1) * sizeof(*visible));
    struct cache *cache;
    size_t n = 0;

    pthread_mutex_lock(&lock);
    cache = of_keys(kv);
    for (uint32_t cell = 0; cache != NULL && visible != NULL && cell < problem->n_tokens; cell++)
        if (is_seen(problem, cell))
            visible[n++] = cell;
    if (cache != NULL && visible == NULL)
        stop("out of memory");
    else if (cache != NULL && cache->pending.kind == 's')
        put_rows(cache, stream, problem->n_tokens, visible, n);
    pthread_mutex_unlock(&lock);
    free(visible);
}

void kvp_trace_write(const kvp_kv *kv, size_t offset, size_t size)
{
    const size_t row = kvp_kv_row_bytes(kv);
    const size_t first = offset / row, end = (offset + size + row - 1) / row;
    struct cache *cache;

    pthread_mutex_lock(&lock);
    cache = size > 0 ? of_keys(kv) : NULL;
    if (cache != NULL) {
        struct pending *pending = &cache->pending;
        if (pending->kind != 'w')
            flush(cache);
        pending->kind = 'w';
        pending->placed = false;
        for (size_t cell = first; cell < end && reserve(pending, pending->n + 1); cell++) {
            pending->numbers[pending->n] = 0;
            pending->cells[pending->n++] = (int64_t)cell;
        }
    }
    pthread_mutex_unlock(&lock);
}

void kvp_trace_copy(const kvp_kv *from, uint32_t from_stream, const kvp_kv *to, uint32_t to_stream)
{
    const size_t bytes = kvp_kv_row_bytes(to) * to->shape.n_cells;
    struct cache *cache;

    if (from->cache != to->cache) {
        kvp_trace_write(to, to_stream * bytes, bytes);
        return;
    }
    pthread_mutex_lock(&lock);
    cache = of_keys(to);
    if (cache != NULL) {
        flush(cache);
        put_line(cache, 'p', to_stream, from_stream);
    }
    pthread_mutex_unlock(&lock);
}

/* Writes the line of a stream's cells that move. */
static void put_shift(struct cache *cache, uint32_t stream, const int32_t *by)
{
    const uint32_t n_cells = cache->keys->shape.n_cells;
    int64_t *slots, *distances;
    size_t n = 0;

    if (file == NULL || !reserve(&cache->pending, n_cells))
        return;
    slots = cache->pending.cells;
    distances = cache->pending.numbers;
    for (uint32_t i = 0; i < n_cells; i++)
        if (by[i] != 0) {
            slots[n] = i;
            distances[n++] = by[i];
        }
    if (n == 0)
        return;
    put_head(cache, 'k', stream, 0);
    put_list(slots, n);
    put_list(distances, n);
    fputs(" -", file);
    end_line();
}

void kvp_trace_shift(const kvp_kv *kv, const int32_t *by, size_t n)
{
    const uint32_t n_cells = kv->shape.n_cells;
    struct cache *cache;

    pthread_mutex_lock(&lock);
    cache = of_keys(kv);
    if (cache != NULL)
        flush(cache);
    for (uint32_t s = 0; cache != NULL && s < n / n_cells; s++)
        put_shift(cache, s, by + s * (size_t)n_cells);
    pthread_mutex_unlock(&lock);
}

void kvp_trace_clear(const void *buffer)
{
    struct cache *cache;

    pthread_mutex_lock(&lock);
    cache = find(buffer);
    if (cache != NULL) {
        flush(cache);
        put_line(cache, 'z', 0, 0);
    }
    pthread_mutex_unlock(&lock);
}

void kvp_trace_close(const void *buffer)
{
    struct cache **at = &caches, *cache;

    pthread_mutex_lock(&lock);
    while (*at != NULL && (*at)->buffer != buffer)
        at = &(*at)->next;
    cache = *at;
    if (cache != NULL) {
        flush(cache);
        put_line(cache, 'x', 0, 0);
        *at = cache->next;
        free(cache->pending.cells);
        free(cache->pending.numbers);
        free(cache);
    }
    pthread_mutex_unlock(&lock);
}
