/* order.c - whether work that uses the same memory is ordered, on the mock device (host.h).
 *
 * The mock does work when it is enqueued, so it would not notice that a stream reads what another
 * stream has yet to write. Each stream has a clock: how much of the work of each stream comes
 * before its next work. Streams, events and waits of the computer change clocks as they order work.
 * It watches matrices of keys, because one stream makes them and graphs in another stream read
 * them. It also watches the working memory of lessons, and the rows that they read. Work that is
 * not ordered ends the program, and so does freeing such memory before the computer has waited for
 * its work. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

enum { MOST_WATCHED = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static host_clock clocks[HOST_STREAMS], computer;
static struct watched {
    const void *at;
    int writer;                       /* -1: none */
    unsigned long written;            /* amount of the writer's work, with the write */
    unsigned long read[HOST_STREAMS]; /* amount of a stream's work, with its last read */
} memory[MOST_WATCHED];
static _Thread_local int launching = -1;

static void merge(host_clock *to, const host_clock *from)
{
    for (int i = 0; i < HOST_STREAMS; i++)
        if (from->of[i] > to->of[i])
            to->of[i] = from->of[i];
}

void host_order_launches(int stream)
{
    launching = stream;
}

void host_order_records(int stream, host_clock *event)
{
    if (stream < 0)
        return;
    pthread_mutex_lock(&lock);
    *event = clocks[stream];
    pthread_mutex_unlock(&lock);
}

void host_order_waits(int stream, const host_clock *event)
{
    if (stream < 0)
        return;
    pthread_mutex_lock(&lock);
    merge(&clocks[stream], event);
    pthread_mutex_unlock(&lock);
}

void host_order_finishes(int stream)
{
    if (stream < 0)
        return;
    pthread_mutex_lock(&lock);
    merge(&computer, &clocks[stream]);
    pthread_mutex_unlock(&lock);
}

static struct watched *find(const void *at)
{
    struct watched *found = NULL;

    for (int i = 0; i < MOST_WATCHED && !found; i++)
        if (memory[i].at == at)
            found = &memory[i];
    for (int i = 0; i < MOST_WATCHED && !found; i++)
        if (!memory[i].at) {
            found = &memory[i];
            *found = (struct watched){ .at = at, .writer = -1 };
        }
    return found;
}

static void check(bool ordered, const char *what, int stream, int other)
{
    if (ordered)
        return;
    fprintf(stderr, "mock of a GPU: stream %d %s memory without waiting for stream %d\n", stream,
            what, other);
    abort();
}

static void forget(struct watched *w)
{
    bool done = w->writer < 0 || computer.of[w->writer] >= w->written;

    for (int i = 0; i < HOST_STREAMS; i++)
        done = done && computer.of[i] >= w->read[i];
    if (!done) {
        fprintf(stderr, "mock of a GPU: memory is freed that a stream may still use\n");
        abort();
    }
    *w = (struct watched){ 0 };
}

/* Memory that was freed may be allocated again. */
void host_order_frees(const void *at, size_t bytes)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_WATCHED; i++)
        if (memory[i].at >= at && (const char *)memory[i].at < (const char *)at + bytes)
            forget(&memory[i]);
    pthread_mutex_unlock(&lock);
}

static void use(kvant_cuda_stream handle, const void *at, bool writes)
{
    const int known = host_stream_number(handle), stream = known < 0 ? launching : known;
    struct watched *w;

    if (stream < 0 || !at)
        return;
    pthread_mutex_lock(&lock);
    w = find(at);
    merge(&clocks[stream], &computer);
    clocks[stream].of[stream]++;
    if (w && w->writer >= 0)
        check(clocks[stream].of[w->writer] >= w->written, writes ? "writes" : "reads", stream,
              w->writer);
    for (int i = 0; i < HOST_STREAMS && w && writes; i++)
        check(clocks[stream].of[i] >= w->read[i], "writes", stream, i);
    if (w && writes)
        w->writer = stream, w->written = clocks[stream].of[stream];
    else if (w)
        w->read[stream] = clocks[stream].of[stream];
    pthread_mutex_unlock(&lock);
}

void host_reads(kvant_cuda_stream stream, const void *at)
{
    use(stream, at, false);
}

void host_writes(kvant_cuda_stream stream, const void *at)
{
    use(stream, at, true);
}
