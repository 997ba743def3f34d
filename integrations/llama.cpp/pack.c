/* pack.c - see pack.h. Reads packed states. No size is believed before the bytes that it counts are
 * there. */
#include "pack.h"

#include <stdlib.h>
#include <string.h>

#include "host.h"

/* Bytes that are read at a time. The system reads a file ahead by less than this. */
#define PIECE ((size_t)1 << 20)

/* Huge pages save most of the time of getting memory for runs, but each run wastes a part of one.
 * The runs of a smaller state are hardly larger than a huge page. Memory that holds no runs gets
 * none: it has a few bytes for each tensor, and a huge page is cleared for each of these. */
#define LARGE_STATE ((size_t)1 << 28)

/* Starting threads takes longer than reading a smaller state. */
#define STATE_FOR_THREADS ((size_t)1 << 22)

bool kvp_plain_create(kvp_plain *plain, size_t n)
{
    *plain = (kvp_plain){ .bytes = n > 0 ? kvp_host_reserve(n) : NULL, .n = n };
    return plain->bytes != NULL;
}

void kvp_plain_free(kvp_plain *plain)
{
    if (plain->bytes != NULL)
        kvp_host_release(plain->bytes, plain->n);
    free(plain->runs);
    *plain = (kvp_plain){ 0 };
}

/* Whether a run lies behind the last one and within n bytes. */
static bool is_next(const kvp_pack_run *last, const kvp_pack_run *run, size_t n)
{
    const uint64_t end = last != NULL ? last->at + last->room : 0;

    return run->at >= end && run->at <= n && run->room <= n - run->at && run->kept < run->room &&
           run->kept >= sizeof(kvp_state_header) + sizeof(uint64_t);
}

bool kvp_plain_add(kvp_plain *plain, size_t at, size_t kept, size_t room)
{
    const kvp_pack_run run = { at, kept, room, 0 };
    const uint32_t more = plain->room > 0 ? 2 * plain->room : 64;
    kvp_pack_run *runs = plain->runs;

    if (!is_next(plain->n_runs > 0 ? &runs[plain->n_runs - 1] : NULL, &run, plain->n))
        return false;
    if (plain->n_runs == plain->room) {
        runs = realloc(runs, more * sizeof(*runs));
        if (runs == NULL)
            return false;
        plain->runs = runs;
        plain->room = more;
    }
    runs[plain->n_runs++] = run;
    return true;
}

bool kvp_plain_has(const kvp_plain *plain, const void *bytes, size_t n)
{
    const uintptr_t first = (uintptr_t)plain->bytes, here = (uintptr_t)bytes;

    return plain->bytes != NULL && here >= first && here - first <= plain->n &&
           n <= plain->n - (here - first);
}

size_t kvp_pack_prefix(const kvp_plain *plain, size_t n_tokens)
{
    uint64_t bytes = kvp_pack_head_bytes(plain->n_runs, (uint32_t)n_tokens) + plain->n;

    for (uint32_t i = 0; i < plain->n_runs; i++)
        bytes -= plain->runs[i].room;
    return (size_t)bytes;
}

size_t kvp_pack_bytes(const kvp_plain *plain, size_t n_tokens)
{
    uint64_t bytes = kvp_pack_prefix(plain, n_tokens);

    for (uint32_t i = 0; i < plain->n_runs; i++)
        bytes += plain->runs[i].kept;
    return (size_t)bytes;
}

size_t kvp_pack_largest_run(const kvp_plain *plain)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < plain->n_runs; i++)
        most = plain->runs[i].kept > most ? plain->runs[i].kept : most;
    return (size_t)most;
}

bool kvp_is_packed(const void *bytes, size_t n)
{
    return n >= KVP_STATE_MAGIC_BYTES && memcmp(bytes, KVP_PACK_MAGIC, KVP_STATE_MAGIC_BYTES) == 0;
}

const char kvp_pack_damaged[] = "it is damaged or cut short";
static const char memory[] = "out of memory";

/* Copies n bytes from a place, and adds them to a checksum unless it is NULL. */
static bool get(const kvp_pack_source *s, uint64_t at, void *bytes, size_t n, kvant_checksum *sum)
{
    uint8_t *to = bytes;

    if (at > s->n || n > s->n - at)
        return false;
    for (size_t piece; n > 0; n -= piece, at += piece, to += piece) {
        piece = n < PIECE ? n : PIECE;
        if (s->from != NULL)
            memcpy(to, s->from + at, piece);
        else if (!kvant_os_read_at(s->file, to, piece, at))
            return false;
        if (sum != NULL)
            kvant_checksum_add(sum, to, piece);
    }
    return true;
}

/* The bytes before the first run, which are read in order. */
typedef struct prefix {
    const kvp_pack_source *s;
    uint64_t at;
    kvant_checksum sum;
    uint64_t check; /* that the sum must have */
} prefix;

static bool get_next(prefix *p, void *bytes, size_t n)
{
    const bool done = get(p->s, p->at, bytes, n, &p->sum);

    p->at += n;
    return done;
}

/* Reads the header. Sizes that this machine cannot count are refused. */
static bool get_header(prefix *p, kvp_pack_header *header)
{
    if (!get(p->s, 0, header, sizeof(*header), NULL) || !kvp_is_packed(header, sizeof(*header)) ||
        header->bytes > p->s->n || header->bytes > SIZE_MAX || header->nominal > SIZE_MAX ||
        kvp_pack_head_bytes(header->n_runs, header->n_tokens) > header->bytes)
        return false;
    p->at = sizeof(*header);
    p->check = header->check;
    header->check = 0;
    kvant_checksum_begin(&p->sum);
    kvant_checksum_add(&p->sum, header, sizeof(*header));
    return true;
}

static const char *get_run_list(prefix *p, const kvp_pack_header *header, kvp_plain *plain)
{
    const size_t bytes = header->n_runs * sizeof(*plain->runs);

    plain->all = header->all != 0;
    plain->n = (size_t)header->nominal;
    plain->runs = malloc(bytes + 1);
    if (plain->runs == NULL)
        return memory;
    if (!get_next(p, plain->runs, bytes))
        return kvp_pack_damaged;
    for (; plain->n_runs < header->n_runs; plain->n_runs++)
        if (!is_next(plain->n_runs > 0 ? &plain->runs[plain->n_runs - 1] : NULL,
                     &plain->runs[plain->n_runs], plain->n))
            return kvp_pack_damaged;
    if (plain->n_runs == 0 || kvp_pack_bytes(plain, header->n_tokens) != header->bytes)
        return kvp_pack_damaged;
    return NULL;
}

/* Reads tokens to `to`, or past them. */
static bool get_tokens(prefix *p, uint32_t n, int32_t *to)
{
    int32_t other[2];
    bool done = to == NULL || get_next(p, to, n * sizeof(*to));

    for (uint32_t i = to != NULL ? n : 0; done && i < (n + 1) / 2 * 2; i++)
        done = get_next(p, other, sizeof(*other));
    return done;
}

static bool get_rest(prefix *p, const kvp_plain *plain)
{
    size_t at = 0;
    bool done = true;

    for (uint32_t i = 0; done && i < plain->n_runs; i++) {
        const kvp_pack_run *run = &plain->runs[i];
        done = get_next(p, plain->bytes + at, (size_t)run->at - at);
        at = (size_t)(run->at + run->room);
    }
    return done && get_next(p, plain->bytes + at, plain->n - at);
}

/* Whether a run that was read has the right checksums. */
static bool is_right(const kvp_pack_run *run, const uint8_t *at)
{
    const size_t kept = (size_t)run->kept, end = kept - sizeof(uint64_t);
    kvp_state_header header;
    uint64_t checksum;
    size_t lists;

    memcpy(&header, at, sizeof(header));
    if (memcmp(at, KVP_STATE_MAGIC, KVP_STATE_MAGIC_BYTES) != 0 || header.bytes != kept ||
        kvp_state_list_bytes(header.n_blocks, header.n_runs) > end)
        return false;
    lists = (size_t)kvp_state_list_bytes(header.n_blocks, header.n_runs);
    memcpy(&checksum, at + end, sizeof(checksum));
    return checksum == kvant_checksum_of(at + lists, end - lists) &&
           run->check == kvp_pack_run_check(at, lists, kept);
}

/* Notes that a run was read, or is right, or failed. False when any failed so far. */
static bool note(kvp_unpacking *u, uint32_t *n, bool done)
{
    bool failed;

    pthread_mutex_lock(&u->lock);
    u->failed = u->failed || !done;
    *n += done;
    failed = u->failed;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    return !failed;
}

/* Waits until more than `run` runs are read (or right). False when one failed. */
static bool wait_for(kvp_unpacking *u, const uint32_t *n, uint32_t run)
{
    bool failed;

    pthread_mutex_lock(&u->lock);
    while (!u->failed && *n <= run)
        pthread_cond_wait(&u->changed, &u->lock);
    failed = u->failed;
    pthread_mutex_unlock(&u->lock);
    return !failed;
}

/* Returns the memory that a run is read to. */
static uint8_t *memory_of(const kvp_unpacking *u, uint32_t i)
{
    return u->early ? u->slots + i % KVP_PACK_SLOTS * u->slot_bytes
                    : u->plain.bytes + u->plain.runs[i].at;
}

/* Returns the bytes of the run that begins at this place of the source. */
static const uint8_t *run_at(const kvp_unpacking *u, uint32_t i, uint64_t place)
{
    return u->early && u->source.from != NULL ? u->source.from + place : memory_of(u, i);
}

static bool read_run(kvp_unpacking *u, uint32_t i, uint64_t place)
{
    const kvp_pack_run *run = &u->plain.runs[i];

    if (u->early && u->source.from != NULL)
        return true;
    if (u->source.from == NULL && i + 1 < u->plain.n_runs)
        kvp_host_read_early(u->source.file, place + run->kept, (size_t)run[1].kept);
    if (u->early && i >= KVP_PACK_SLOTS && !wait_for(u, &u->n_free, i - KVP_PACK_SLOTS))
        return false;
    return get(&u->source, place, memory_of(u, i), (size_t)run->kept, NULL);
}

static void *read_runs(void *of)
{
    kvp_unpacking *u = of;
    uint64_t at = u->first;
    bool all = true;

    for (uint32_t i = 0; i < u->plain.n_runs && all; at += u->plain.runs[i++].kept)
        all = note(u, &u->n_read, read_run(u, i, at));
    return NULL;
}

static void *check_runs(void *of)
{
    kvp_unpacking *u = of;
    uint64_t at = u->first;

    for (uint32_t i = 0; i < u->plain.n_runs && wait_for(u, &u->n_read, i);
         at += u->plain.runs[i++].kept)
        note(u, &u->n_right, is_right(&u->plain.runs[i], run_at(u, i, at)));
    return NULL;
}

/* Runs that the caller receives one by one need both threads. Otherwise they can be read at once.
 * Returns NULL, or the reason why it cannot be done. */
static const char *begin_runs(kvp_unpacking *u)
{
    const bool large = u->plain.n >= STATE_FOR_THREADS;

    u->next = u->first;
    u->early = u->early && large;
    u->slot_bytes = kvp_pack_largest_run(&u->plain);
    if (u->early && u->source.from == NULL) {
        u->slots = kvp_host_reserve(KVP_PACK_SLOTS * u->slot_bytes);
        if (u->slots == NULL)
            return memory;
        kvp_host_want_huge_pages(u->slots, KVP_PACK_SLOTS * u->slot_bytes);
    }
    pthread_mutex_init(&u->lock, NULL);
    pthread_cond_init(&u->changed, NULL);
    u->began = true;
    u->reads = large && kvant_os_start_thread(&u->reader, read_runs, u, 0);
    u->checks = u->reads && kvant_os_start_thread(&u->checker, check_runs, u, 0);
    if (u->early)
        return u->checks ? NULL : memory;
    if (!u->reads)
        read_runs(u);
    if (!u->checks)
        check_runs(u);
    return u->checks || wait_for(u, &u->n_right, u->plain.n_runs - 1) ? NULL : kvp_pack_damaged;
}

static const char *get_prefix(kvp_unpacking *u, bool all, kvp_pack_tokens *tokens)
{
    prefix p = { .s = &u->source };
    kvp_pack_header header;
    kvp_plain *plain = &u->plain;
    const char *why;

    if (!get_header(&p, &header))
        return kvp_pack_damaged;
    if ((header.all != 0) != all)
        return all ? "it has one sequence, not all" : "it has all sequences, not one";
    why = get_run_list(&p, &header, plain);
    if (why != NULL)
        return why;
    if (tokens != NULL && header.n_tokens > tokens->room)
        return "it has more tokens than there is room for";
    if (!get_tokens(&p, header.n_tokens, tokens != NULL ? tokens->to : NULL))
        return kvp_pack_damaged;
    if (tokens != NULL)
        tokens->n = header.n_tokens;
    plain->bytes = plain->n > 0 ? kvp_host_reserve(plain->n) : NULL;
    if (plain->bytes == NULL)
        return memory;
    if (!u->early && plain->n >= LARGE_STATE)
        kvp_host_want_huge_pages(plain->bytes, plain->n);
    if (!get_rest(&p, plain) || kvant_checksum_end(&p.sum) != p.check)
        return kvp_pack_damaged;
    u->first = p.at;
    return NULL;
}

const char *kvp_unpacking_begin(kvp_unpacking *u, const kvp_pack_source *source, bool all,
                                bool early, kvp_pack_tokens *tokens, kvp_unpacking_form *change,
                                void *context)
{
    const char *why;

    *u = (kvp_unpacking){ .source = *source, .early = early };
    if (source->from == NULL)
        kvp_host_read_in_order(source->file);
    why = source->from != NULL || kvant_os_size(source->file, &u->source.n)
              ? get_prefix(u, all, tokens)
              : kvp_pack_damaged;
    if (why == NULL && change != NULL)
        change(&u->plain, context);
    if (why == NULL)
        why = begin_runs(u);
    if (why != NULL)
        kvp_unpacking_free(u);
    return why;
}

/* The caller does not need the runs any more that it has received. */
static void free_slots(kvp_unpacking *u)
{
    pthread_mutex_lock(&u->lock);
    u->n_free = u->n_seen;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
}

const uint8_t *kvp_unpacking_wait(kvp_unpacking *u, const uint8_t *bytes, size_t n, bool moves)
{
    const kvp_plain *plain = &u->plain;
    const uint64_t first = (uint64_t)(bytes - plain->bytes), end = first + n;

    while (u->early && u->n_seen < plain->n_runs && plain->runs[u->n_seen].at < end) {
        const kvp_pack_run *run = &plain->runs[u->n_seen];
        const uint8_t *from = run_at(u, u->n_seen, u->next);
        free_slots(u);
        if (!wait_for(u, &u->n_right, u->n_seen))
            return NULL;
        u->missed = u->missed || run->at + run->room <= first;
        u->next += run->kept;
        u->n_seen++;
        if (moves && run->at == first && run->room == n)
            return from;
        memcpy(plain->bytes + run->at, from, (size_t)run->kept);
    }
    return bytes;
}

bool kvp_unpacking_has(const kvp_unpacking *u, const void *bytes, size_t n)
{
    const kvp_plain slots = { .bytes = u->slots, .n = KVP_PACK_SLOTS * u->slot_bytes },
                    from = { .bytes = u->early ? (uint8_t *)(uintptr_t)u->source.from : NULL,
                             .n = (size_t)u->source.n };

    return kvp_plain_has(&u->plain, bytes, n) || kvp_plain_has(&slots, bytes, n) ||
           kvp_plain_has(&from, bytes, n);
}

const char *kvp_unpacking_finish(kvp_unpacking *u)
{
    bool failed;

    pthread_mutex_lock(&u->lock);
    failed = u->failed;
    u->failed = u->failed || u->early; /* the threads end */
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    if (u->reads)
        pthread_join(u->reader, NULL);
    if (u->checks)
        pthread_join(u->checker, NULL);
    u->reads = u->checks = false;
    return failed || (u->failed && !u->early) ? kvp_pack_damaged : NULL;
}

void kvp_unpacking_free(kvp_unpacking *u)
{
    if (u->began) {
        kvp_unpacking_finish(u);
        pthread_cond_destroy(&u->changed);
        pthread_mutex_destroy(&u->lock);
        u->began = false;
    }
    if (u->slots != NULL)
        kvp_host_release(u->slots, KVP_PACK_SLOTS * u->slot_bytes);
    u->slots = NULL;
    kvp_plain_free(&u->plain);
}

const char *kvp_pack_count(int file, size_t *n_tokens)
{
    kvp_pack_source s = { .file = file };
    prefix p = { .s = &s };
    kvp_pack_header header;

    if (!kvant_os_size(file, &s.n) || !get_header(&p, &header))
        return kvp_pack_damaged;
    *n_tokens = header.n_tokens;
    return NULL;
}
