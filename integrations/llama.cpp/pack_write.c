/* pack_write.c - writes packed states (pack.h). A thread writes the runs of a file while llama.cpp
 * makes the next ones, so a state is never in memory as a whole. */
#include "pack.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

/* The disk begins to write a part of the file when it is there. Smaller parts cost more calls.
 * Larger ones leave more to write at the end. */
#define EARLY_PART ((size_t)1 << 22)

/* Smaller runs are written at once, because waking a thread takes as long. */
#define RUN_FOR_THREAD ((size_t)1 << 18)

void kvp_packing_to_memory(kvp_packing *p, kvp_plain *plain, uint8_t *to)
{
    *p = (kvp_packing){ .plain = plain, .to = to, .next = kvp_pack_prefix(plain, 0) };
}

static bool write_part(int file, const uint8_t *bytes, size_t n, uint64_t at, bool early)
{
    for (size_t part; n > 0; n -= part, bytes += part, at += part) {
        part = n < EARLY_PART ? n : EARLY_PART;
        if (!kvant_os_write_at(file, bytes, part, at))
            return false;
        if (early)
            kvp_host_write_early(file, at, part);
    }
    return true;
}

/* Writes the part of a slot. Returns errno, or 0. */
static int write_slot(const kvp_packing *p, uint32_t slot)
{
    const struct kvp_pack_part *part = &p->parts[slot];

    return write_part(p->file, p->slots + slot * p->slot_bytes, part->n, part->at, true) ? 0
                                                                                         : errno;
}

static void *write_slots(void *of)
{
    kvp_packing *p = of;

    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->n_written == p->n && !p->ends)
            pthread_cond_wait(&p->changed, &p->lock);
        if (p->n_written == p->n)
            break;
        if (p->error == 0) {
            int error;
            pthread_mutex_unlock(&p->lock);
            error = write_slot(p, p->n_written % KVP_PACK_SLOTS);
            pthread_mutex_lock(&p->lock);
            p->error = error;
        }
        p->n_written++;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static bool start_thread(kvp_packing *p)
{
    if (p->slot_bytes < RUN_FOR_THREAD)
        return false;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    if (kvant_os_start_thread(&p->thread, write_slots, p, 0))
        return true;
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    return false;
}

static void stop_thread(kvp_packing *p)
{
    if (!p->runs)
        return;
    pthread_mutex_lock(&p->lock);
    p->ends = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    p->runs = false;
}

bool kvp_packing_to_file(kvp_packing *p, kvp_plain *plain, const int32_t *tokens, size_t n_tokens,
                         const char *path)
{
    const size_t most = kvp_pack_largest_run(plain);

    *p = (kvp_packing){ .plain = plain,
                        .tokens = tokens,
                        .n_tokens = n_tokens,
                        .next = kvp_pack_prefix(plain, n_tokens),
                        .name = malloc(KVP_MOST_PATH),
                        .path = path,
                        .slots = kvp_host_reserve(KVP_PACK_SLOTS * most),
                        .slot_bytes = most };
    errno = ENOMEM;
    if (p->name == NULL || p->slots == NULL ||
        !kvp_host_create(path, p->name, KVP_MOST_PATH, &p->file)) {
        const int error = errno;
        if (p->slots != NULL)
            kvp_host_release(p->slots, KVP_PACK_SLOTS * most);
        free(p->name);
        errno = error;
        return false;
    }
    kvp_host_want_huge_pages(p->slots, KVP_PACK_SLOTS * most);
    p->runs = start_thread(p);
    return true;
}

/* Waits until the thread has written the run that was in the next slot before. */
static uint8_t *free_slot(kvp_packing *p)
{
    if (p->runs) {
        pthread_mutex_lock(&p->lock);
        while (p->n - p->n_written == KVP_PACK_SLOTS)
            pthread_cond_wait(&p->changed, &p->lock);
        pthread_mutex_unlock(&p->lock);
    }
    return p->slots + p->n % KVP_PACK_SLOTS * p->slot_bytes;
}

uint8_t *kvp_packing_place(kvp_packing *p, size_t at, size_t kept, size_t room)
{
    const kvp_pack_run *run = &p->plain->runs[p->n];

    if (p->failed || p->n == p->plain->n_runs || run->at != at || run->kept != kept ||
        run->room != room) {
        p->failed = true;
        return NULL;
    }
    p->current = p->to != NULL ? p->to + p->next : free_slot(p);
    return p->current;
}

void kvp_packing_placed(kvp_packing *p)
{
    kvp_pack_run *run = &p->plain->runs[p->n];
    const uint32_t slot = p->n % KVP_PACK_SLOTS;
    kvp_state_header header;

    memcpy(&header, p->current, sizeof(header));
    run->check =
        kvp_pack_run_check(p->current, (size_t)kvp_state_list_bytes(header.n_blocks, header.n_runs),
                           (size_t)run->kept);
    p->parts[slot] = (struct kvp_pack_part){ p->next, (size_t)run->kept };
    p->next += run->kept;
    if (!p->runs) {
        if (p->to == NULL && p->error == 0)
            p->error = write_slot(p, slot);
        p->n++;
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->n++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

/* The bytes before the first run, which are written in order. */
typedef struct prefix {
    kvp_packing *p;
    uint64_t at;
    kvant_checksum sum;
} prefix;

static void put(prefix *to, const void *bytes, size_t n)
{
    kvp_packing *p = to->p;

    kvant_checksum_add(&to->sum, bytes, n);
    if (p->to != NULL && n > 0)
        memcpy(p->to + to->at, bytes, n);
    else if (p->error == 0 && !write_part(p->file, bytes, n, to->at, false))
        p->error = errno;
    to->at += n;
}

static void put_rest(prefix *to, const kvp_plain *plain)
{
    size_t at = 0;

    for (uint32_t i = 0; i < plain->n_runs; i++) {
        const kvp_pack_run *run = &plain->runs[i];
        put(to, plain->bytes + at, (size_t)run->at - at);
        at = (size_t)(run->at + run->room);
    }
    put(to, plain->bytes + at, plain->n - at);
}

static void put_prefix(kvp_packing *p)
{
    static const int32_t zero;
    const kvp_plain *plain = p->plain;
    kvp_pack_header header = { .bytes = kvp_pack_bytes(plain, p->n_tokens),
                               .nominal = plain->n,
                               .n_runs = plain->n_runs,
                               .n_tokens = (uint32_t)p->n_tokens,
                               .all = plain->all };
    prefix to = { .p = p };

    memcpy(header.magic, KVP_PACK_MAGIC, KVP_STATE_MAGIC_BYTES);
    kvant_checksum_begin(&to.sum);
    put(&to, &header, sizeof(header));
    put(&to, plain->runs, plain->n_runs * sizeof(*plain->runs));
    put(&to, p->tokens, p->n_tokens * sizeof(*p->tokens));
    put(&to, &zero, p->n_tokens % 2 * sizeof(zero));
    put_rest(&to, plain);
    header.check = kvant_checksum_end(&to.sum);
    to.at = 0;
    put(&to, &header, sizeof(header));
}

bool kvp_packing_end(kvp_packing *p, bool keep)
{
    bool done;

    stop_thread(p);
    keep = keep && !p->failed && p->n == p->plain->n_runs;
    if (keep && p->error == 0)
        put_prefix(p);
    done = keep && p->error == 0;
    errno = p->error;
    if (p->to != NULL)
        return done;
    done = kvp_host_finish(p->file, p->path, p->name, done);
    kvp_host_release(p->slots, KVP_PACK_SLOTS * p->slot_bytes);
    free(p->name);
    return done;
}
