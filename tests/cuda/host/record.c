/* record.c - streams, events and graphs of the stand-in's driver (host.h): work on a stream that is captured is recorded,
 * and done when its graph is launched.
 *
 * As in CUDA, a stream joins a capture by waiting for an event of it, and has to return to the stream that began it: the
 * end of the capture fails (901) when work of a stream was not awaited. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "internal.h"

#define EXPORT __attribute__((visibility("default")))
enum { MOST_STREAMS = 64, UNJOINED = 901, BAD = 1 };

typedef struct work {
    struct work *next;
    host_work *run;
    max_align_t data[];
} work;

typedef struct graph {
    int users;
    unsigned n;
    work *first, **last;
} graph;

typedef struct stream {
    void *context;
    graph *capture;
    bool origin;
    unsigned long done, awaited; /* work of this capture, and how much of it the origin waits for */
} stream;

typedef struct event {
    struct timespec time; /* first: cuEventElapsedTime reads it */
    stream *of;
    graph *capture;
    unsigned long done;
} event;

static stream *streams[MOST_STREAMS];
static unsigned long n_launches, n_updates;

static stream *stream_of(const void *handle)
{
    for (int i = 0; i < MOST_STREAMS; i++)
        if (handle && streams[i] == handle)
            return streams[i];
    return NULL;
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
    for (work *w = g->first, *next; w; w = next) {
        next = w->next;
        free(w);
    }
    free(g);
}

EXPORT unsigned long host_launches(unsigned long *updates)
{
    *updates = n_updates;
    return n_launches;
}

EXPORT int cuStreamCreate(void **handle, unsigned flags)
{
    for (int i = 0; i < MOST_STREAMS; i++)
        if (!streams[i]) {
            *handle = streams[i] = calloc(1, sizeof **streams);
            streams[i]->context = host_context();
            return flags != 1;
        }
    return BAD;
}

EXPORT int cuStreamDestroy_v2(void *handle)
{
    for (int i = 0; i < MOST_STREAMS; i++)
        if (streams[i] == handle)
            streams[i] = NULL;
    free(handle);
    return 0;
}

EXPORT int cuStreamSynchronize(void *handle)
{
    return host_captures(handle) ? 900 : 0;
}

EXPORT int cuStreamWaitEvent(void *handle, const event *e, unsigned flags)
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
    return 0;
}

EXPORT int cuStreamBeginCapture_v2(void *handle, int mode)
{
    stream *s = stream_of(handle);
    if (!s)
        return handle == NULL || mode != 1; /* of kvant bench cuda, whose graphs run nothing */
    s->capture = calloc(1, sizeof *s->capture);
    s->capture->last = &s->capture->first;
    s->capture->users = 1;
    s->origin = true;
    return mode != 2;
}

EXPORT int cuStreamEndCapture(void *handle, void **result)
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
    for (int i = 0; i < MOST_STREAMS; i++)
        if (streams[i] && streams[i]->capture == g) {
            error = error || (streams[i] != s && streams[i]->awaited < streams[i]->done) ? UNJOINED : 0;
            streams[i]->capture = NULL;
            streams[i]->origin = false;
        }
    return error;
}

EXPORT int cuGraphInstantiateWithFlags(graph ***executable, graph *g, unsigned long long flags)
{
    *executable = malloc(sizeof **executable);
    **executable = g;
    g->users++;
    return g == NULL || flags != 0;
}

EXPORT int cuGraphExecUpdate_v2(graph **executable, graph *g, void *info)
{
    if (!info || (*executable)->n != g->n)
        return 910;
    release(*executable);
    *executable = g;
    g->users++;
    n_updates++;
    return 0;
}

EXPORT int cuGraphLaunch(graph **executable, void *handle)
{
    if (!handle || host_captures(handle) || host_is_foreign(handle))
        return BAD;
    for (work *w = (*executable)->first; w; w = w->next)
        w->run(w->data);
    n_launches++;
    return 0;
}

EXPORT int cuGraphExecDestroy(graph **executable)
{
    release(*executable);
    free(executable);
    return 0;
}

EXPORT int cuGraphDestroy(graph *g)
{
    release(g);
    return 0;
}

EXPORT int cuEventCreate(event **e, unsigned flags)
{
    *e = calloc(1, sizeof **e);
    return flags & ~2u;
}

EXPORT int cuEventDestroy_v2(event *e)
{
    free(e);
    return 0;
}

EXPORT int cuEventRecord(event *e, void *handle)
{
    clock_gettime(CLOCK_MONOTONIC, &e->time);
    e->of = stream_of(handle);
    e->capture = e->of ? e->of->capture : NULL;
    e->done = e->of ? e->of->done : 0;
    return handle == NULL;
}

/* What a replay calls: the functions of the table, on a stream of no capture. */
#define RUN(name, type)                                                                                            \
    void host_run_##name(void *args)                                                                               \
    {                                                                                                              \
        host_##name(args, &n_launches);                                                                            \
    }
HOST_RECORDED(RUN)
RUN(merge, kvant_cuda_merge_args)
