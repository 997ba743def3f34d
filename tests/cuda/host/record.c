/* record.c - streams, events and graphs of the mock driver (host.h): work on a stream that is
 * captured is recorded, and done when its graph is launched.
 *
 * A graph has the edges that CUDA makes for two streams: from each piece of work to the next, and
 * some redundant edges.
 *
 * As in CUDA, a stream joins a capture when it waits for an event of the capture, and has to return
 * to the stream that began it. The end of the capture fails (901) if the origin did not wait for
 * work of a stream. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "internal.h"

enum { UNJOINED = 901, BAD = 1 };

typedef struct work {
    struct work *next;
    host_work *run;
    max_align_t data[];
} work;

typedef struct edge {
    work *from, *to;
    unsigned char data[8]; /* ports, then the type: 1 for an early begin */
} edge;

typedef struct graph {
    int users;
    unsigned n;
    work *first, **last;
    edge *edges;
    size_t n_edges;
    bool launched;
} graph;

typedef struct stream {
    void *context;
    graph *capture;
    bool origin;
    /* amount of work in this capture, and how much of it the origin waits for */
    unsigned long done, awaited;
} stream;

typedef struct event {
    struct timespec time; /* first, because cuEventElapsedTime reads it */
    stream *of;
    graph *capture;
    unsigned long done;
    host_clock clock;
} event;

/* Threads of the plug-in create, use and destroy streams of their own at the same time. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream *streams[HOST_STREAMS];
static unsigned long n_launches, n_updates;
static size_t n_left;
static _Thread_local unsigned long n_waits;
static atomic_ulong n_unlaunched;

static stream *stream_of(const void *handle)
{
    stream *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < HOST_STREAMS && !found; i++)
        if (handle && streams[i] == handle)
            found = streams[i];
    pthread_mutex_unlock(&lock);
    return found;
}

int host_stream_number(kvant_cuda_stream handle)
{
    int number = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < HOST_STREAMS && handle && number < 0; i++)
        if (streams[i] == handle)
            number = i;
    pthread_mutex_unlock(&lock);
    return number;
}

bool host_captures(kvant_cuda_stream handle)
{
    const stream *s = stream_of(handle);
    return s && s->capture;
}

bool host_is_foreign(kvant_cuda_stream handle)
{
    const stream *s = stream_of(handle);
    return s && s->context != host_context();
}

bool host_record(kvant_cuda_stream handle, host_work *run, const void *data, size_t bytes)
{
    stream *s = stream_of(handle);
    if (!s || !s->capture)
        return false;
    work *w = malloc(sizeof *w + bytes);
    w->next = NULL;
    w->run = run;
    memcpy(w->data, data, bytes);
    *s->capture->last = w;
    s->capture->last = &w->next;
    s->capture->n++;
    s->done++;
    return true;
}

static void release(graph *g)
{
    if (--g->users > 0)
        return;
    n_unlaunched += g->launched ? 0 : g->n;
    for (work *w = g->first, *next; w; w = next) {
        next = w->next;
        free(w);
    }
    free(g->edges);
    free(g);
}

EXPORT(unsigned long, host_launches, (unsigned long *updates))
{
    *updates = n_updates;
    return n_launches;
}

/* Edges beyond those from each piece of work to the next in the graph that was launched last. */
EXPORT(size_t, host_edges_left, (void))
{
    return n_left;
}

EXPORT(int, cuStreamCreate, (void **handle, unsigned flags))
{
    stream *created = calloc(1, sizeof *created);
    int place = 0;
    created->context = host_context();
    pthread_mutex_lock(&lock);
    while (place < HOST_STREAMS && streams[place])
        place++;
    if (place < HOST_STREAMS)
        *handle = streams[place] = created;
    pthread_mutex_unlock(&lock);
    if (place < HOST_STREAMS)
        return flags != 1;
    free(created);
    return BAD;
}

EXPORT(int, cuStreamDestroy_v2, (void *handle))
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < HOST_STREAMS; i++)
        if (streams[i] == handle)
            streams[i] = NULL;
    pthread_mutex_unlock(&lock);
    free(handle);
    return 0;
}

/* Pieces of work in graphs that are gone and were never launched. */
EXPORT(unsigned long, host_unlaunched, (void))
{
    return n_unlaunched;
}

/* How often this thread waited for a stream. */
EXPORT(unsigned long, host_waits, (void))
{
    return n_waits;
}

EXPORT(int, cuStreamSynchronize, (void *handle))
{
    n_waits++;
    host_order_finishes(host_stream_number(handle));
    return host_captures(handle) ? 900 : 0;
}

/* The same for the mock of ggml-cuda, whose waits are not counted. */
EXPORT(void, host_finish, (void *handle))
{
    host_order_finishes(host_stream_number(handle));
}

EXPORT(int, cuStreamWaitEvent, (void *handle, const event *e, unsigned flags))
{
    stream *s = stream_of(handle);
    if (!s || flags)
        return BAD;
    if (e->capture && !s->capture) {
        s->capture = e->capture;
        s->done = s->awaited = 0;
    }
    if (e->capture && s->origin && e->of)
        e->of->awaited = e->done;
    host_order_waits(host_stream_number(handle), &e->clock);
    return 0;
}

EXPORT(int, cuStreamBeginCapture_v2, (void *handle, int mode))
{
    stream *s = stream_of(handle);
    if (!s)
        /* the handle of kvant bench cuda, whose graphs run nothing */
        return handle == NULL || mode != 1;
    s->capture = calloc(1, sizeof *s->capture);
    s->capture->last = &s->capture->first;
    s->capture->users = 1;
    s->origin = true;
    return mode != 2;
}

static void add_edge(graph *g, const edge *e)
{
    g->edges = realloc(g->edges, (g->n_edges + 1) * sizeof *g->edges);
    g->edges[g->n_edges++] = *e;
}

static void add_edges(graph *g)
{
    work *former = NULL, *before = NULL;
    unsigned i = 0;
    for (work *w = g->first; w; former = before, before = w, w = w->next, i++) {
        if (before)
            add_edge(g, &(edge){ before, w, { 0 } });
        if (former && i % 3 == 0)
            add_edge(g, &(edge){ former, w, { 1, 0, i % 2 } });
    }
}

static edge *find_edge(graph *g, const work *from, const work *to)
{
    for (size_t i = 0; i < g->n_edges; i++)
        if (g->edges[i].from == from && g->edges[i].to == to)
            return &g->edges[i];
    return NULL;
}

static bool in_one_line(graph *g)
{
    for (work *w = g->first; w && w->next; w = w->next)
        if (!find_edge(g, w, w->next))
            return false;
    return true;
}

EXPORT(int, cuGraphGetEdges_v2,
       (graph * g, work **from, work **to, unsigned char (*data)[8], size_t *n))
{
    *n = g->n_edges;
    for (size_t i = 0; from && i < g->n_edges; i++) {
        from[i] = g->edges[i].from;
        to[i] = g->edges[i].to;
        memcpy(data[i], g->edges[i].data, sizeof data[i]);
    }
    return 0;
}

EXPORT(int, cuGraphRemoveDependencies_v2,
       (graph * g, work **from, work **to, unsigned char (*data)[8], size_t n))
{
    for (size_t i = 0; i < n; i++) {
        edge *e = find_edge(g, from[i], to[i]);
        if (!e || memcmp(e->data, data[i], sizeof data[i]) != 0)
            return BAD;
        *e = g->edges[--g->n_edges];
    }
    return 0;
}

EXPORT(int, cuStreamEndCapture, (void *handle, void **result))
{
    stream *s = stream_of(handle);
    int error = 0;
    if (!s) {
        graph *none = calloc(1, sizeof *none);
        none->users = 1;
        *result = none;
        return handle == NULL;
    }
    graph *g = *result = s->capture;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < HOST_STREAMS; i++)
        if (streams[i] && streams[i]->capture == g) {
            error =
                error || (streams[i] != s && streams[i]->awaited < streams[i]->done) ? UNJOINED : 0;
            streams[i]->capture = NULL;
            streams[i]->origin = false;
        }
    pthread_mutex_unlock(&lock);
    add_edges(g);
    return error;
}

EXPORT(int, cuGraphInstantiateWithFlags, (graph * **executable, graph *g, unsigned long long flags))
{
    *executable = malloc(sizeof **executable);
    **executable = g;
    g->users++;
    return g == NULL || flags != 0;
}

EXPORT(int, cuGraphExecUpdate_v2, (graph * *executable, graph *g, void *info))
{
    if (!info || (*executable)->n != g->n)
        return 910;
    release(*executable);
    *executable = g;
    g->users++;
    n_updates++;
    return 0;
}

EXPORT(int, cuGraphLaunch, (graph * *executable, void *handle))
{
    if (!handle || host_captures(handle) || host_is_foreign(handle) || !in_one_line(*executable))
        return BAD;
    host_order_launches(host_stream_number(handle));
    for (work *w = (*executable)->first; w; w = w->next)
        w->run(w->data);
    host_order_launches(-1);
    (*executable)->launched = true;
    n_left = (*executable)->n_edges + 1 - (*executable)->n;
    n_launches++;
    return 0;
}

EXPORT(int, cuGraphExecDestroy, (graph * *executable))
{
    release(*executable);
    free(executable);
    return 0;
}

EXPORT(int, cuGraphDestroy, (graph * g))
{
    release(g);
    return 0;
}

EXPORT(int, cuEventCreate, (event * *e, unsigned flags))
{
    *e = calloc(1, sizeof **e);
    return (flags & ~3u) != 0;
}

EXPORT(int, cuEventDestroy_v2, (event * e))
{
    free(e);
    return 0;
}

EXPORT(int, cuEventRecord, (event * e, void *handle))
{
    clock_gettime(CLOCK_MONOTONIC, &e->time);
    e->of = stream_of(handle);
    e->capture = e->of ? e->of->capture : NULL;
    e->done = e->of ? e->of->done : 0;
    host_order_records(host_stream_number(handle), &e->clock);
    return handle == NULL;
}

/* The functions that a replay calls: the table's functions, on a stream without a capture. */
#define RUN(name, type)                                                                            \
    void host_run_##name(void *args)                                                               \
    {                                                                                              \
        host_##name(args, &n_launches);                                                            \
    }
HOST_RECORDED(RUN)
