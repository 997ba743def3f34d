/* pack.c - see pack.h. */
#include "pack.h"

#include <stdlib.h>
#include <string.h>

#include "../../src/base/fnv.h"
#include "host.h"

/* Bytes that are copied and hashed at a time, while the processor's cache still has them. */
#define PIECE ((size_t)1 << 16)

/* Longer than any path that a system opens. */
#define MAX_PATH 4200

/* Huge pages save most of the time of getting memory, but each run of a state wastes a part of one.
 * The runs of a smaller state are hardly larger than a huge page. */
#define LARGE_STATE ((size_t)1 << 28)

/* A file's parts that the disk begins to write or to read early. Smaller parts cost more calls.
 * Larger ones leave more to write at the end. If the disk is asked for too much at once, asking
 * waits for the disk. */
#define EARLY_PART ((size_t)1 << 23)
#define PARTS_AHEAD 8u

static uint8_t *reserve(size_t n)
{
    uint8_t *bytes = n > 0 ? kvp_host_reserve(n) : NULL;

    if (bytes != NULL && n >= LARGE_STATE)
        kvp_host_want_huge_pages(bytes, n);
    return bytes;
}

bool kvp_plain_create(kvp_plain *plain, size_t n)
{
    *plain = (kvp_plain){ .bytes = reserve(n), .n = n };
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
           run->kept >= sizeof(kvp_state_header);
}

bool kvp_plain_add(kvp_plain *plain, size_t at, size_t kept, size_t room)
{
    const kvp_pack_run run = { at, kept, room };
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

static uint64_t zero_bytes(const kvp_pack_run *runs, uint32_t n)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < n; i++)
        bytes += runs[i].room - runs[i].kept;
    return bytes;
}

size_t kvp_pack_bytes(const kvp_plain *plain, size_t n_tokens)
{
    return (size_t)kvp_pack_head_bytes(plain->n_runs, (uint32_t)n_tokens) + plain->n -
           (size_t)zero_bytes(plain->runs, plain->n_runs);
}

/* Bytes that come from, or go to, memory or a file, and the checksum of all of them so far. */
typedef struct stream {
    FILE *file;
    uint8_t *to;         /* memory, if no file is written */
    const uint8_t *from; /* memory, if no file is read */
    size_t left;         /* in `from` */
    kvant_checksum sum;
    size_t early, done; /* bytes of the file that the disk was told of, and that were moved */
    bool failed;
} stream;

static void put_to_file(stream *s, const uint8_t *at, size_t n)
{
    s->failed = fwrite(at, 1, n, s->file) != n;
    s->done += n;
    if (s->done - s->early < EARLY_PART)
        return;
    kvp_host_write_early(s->file, s->early, s->done - s->early);
    s->early = s->done;
}

static void get_from_file(stream *s, uint8_t *at, size_t n)
{
    for (; s->early < s->done + PARTS_AHEAD * EARLY_PART; s->early += EARLY_PART)
        kvp_host_read_early(s->file, s->early, EARLY_PART);
    s->failed = fread(at, 1, n, s->file) != n;
    s->done += n;
}

static void get_from_memory(stream *s, uint8_t *at, size_t n)
{
    s->failed = s->left < n;
    if (s->failed)
        return;
    memcpy(at, s->from, n);
    s->from += n;
    s->left -= n;
}

static void put(stream *s, const void *bytes, size_t n)
{
    const uint8_t *at = bytes;

    for (size_t piece; n > 0 && !s->failed; at += piece, n -= piece) {
        piece = n < PIECE ? n : PIECE;
        kvant_checksum_add(&s->sum, at, piece);
        if (s->file != NULL)
            put_to_file(s, at, piece);
        else
            memcpy(s->to, at, piece);
        s->to += s->file == NULL ? piece : 0;
    }
}

static void get(stream *s, void *bytes, size_t n)
{
    uint8_t *at = bytes;

    for (size_t piece; n > 0 && !s->failed; at += piece, n -= piece) {
        piece = n < PIECE ? n : PIECE;
        if (s->file != NULL)
            get_from_file(s, at, piece);
        else
            get_from_memory(s, at, piece);
        if (s->failed)
            return;
        kvant_checksum_add(&s->sum, at, piece);
    }
}

/* Goes through the bytes of a state that are not zeros of its runs. */
static void each_part(stream *s, void (*move)(stream *s, void *bytes, size_t n),
                      const kvp_plain *plain)
{
    size_t at = 0;

    for (uint32_t i = 0; i < plain->n_runs; i++) {
        const kvp_pack_run *run = &plain->runs[i];
        move(s, plain->bytes + at, (size_t)(run->at + run->kept) - at);
        at = (size_t)(run->at + run->room);
    }
    move(s, plain->bytes + at, plain->n - at);
}

static void put_part(stream *s, void *bytes, size_t n)
{
    put(s, bytes, n);
}

/* Writes a packed state; the caller writes the header once more, which then has the checksum. */
static kvp_pack_header put_state(stream *s, const kvp_plain *plain, const int32_t *tokens, size_t n)
{
    static const int32_t zero;
    kvp_pack_header header = { .bytes = kvp_pack_bytes(plain, n),
                               .nominal = plain->n,
                               .n_runs = plain->n_runs,
                               .n_tokens = (uint32_t)n,
                               .all = plain->all };

    memcpy(header.magic, KVP_PACK_MAGIC, KVP_STATE_MAGIC_BYTES);
    kvant_checksum_begin(&s->sum);
    put(s, &header, sizeof(header));
    put(s, plain->runs, plain->n_runs * sizeof(*plain->runs));
    put(s, tokens, n * sizeof(*tokens));
    put(s, &zero, n % 2 * sizeof(zero));
    each_part(s, put_part, plain);
    header.check = kvant_checksum_end(&s->sum);
    return header;
}

void kvp_pack(const kvp_plain *plain, uint8_t *to)
{
    stream s = { .to = to };
    const kvp_pack_header header = put_state(&s, plain, NULL, 0);

    memcpy(to, &header, sizeof(header));
}

bool kvp_pack_save(const kvp_plain *plain, const int32_t *tokens, size_t n_tokens, const char *path)
{
    char name[MAX_PATH];
    stream s = { .file = kvp_host_create(path, name, sizeof(name)) };
    kvp_pack_header header;

    if (s.file == NULL)
        return false;
    header = put_state(&s, plain, tokens, n_tokens);
    s.failed = s.failed || fseek(s.file, 0, SEEK_SET) != 0 ||
               fwrite(&header, sizeof(header), 1, s.file) != 1;
    return kvp_host_finish(s.file, path, name, !s.failed);
}

bool kvp_is_packed(const void *bytes, size_t n)
{
    return n >= KVP_STATE_MAGIC_BYTES && memcmp(bytes, KVP_PACK_MAGIC, KVP_STATE_MAGIC_BYTES) == 0;
}

/* Unpacking. No size is believed before the bytes that it counts are there. */

static const char damaged[] = "it is damaged or cut short";

/* Reads the header, whose checksum is 0 afterwards, as when it was hashed. */
static bool get_header(stream *s, uint64_t size, kvp_pack_header *header, uint64_t *check)
{
    stream raw = *s;

    kvant_checksum_begin(&raw.sum);
    get(&raw, header, sizeof(*header));
    if (raw.failed || !kvp_is_packed(header, sizeof(*header)) || header->bytes > size ||
        kvp_pack_head_bytes(header->n_runs, header->n_tokens) > header->bytes)
        return false;
    *s = raw;
    *check = header->check;
    header->check = 0;
    kvant_checksum_begin(&s->sum);
    kvant_checksum_add(&s->sum, header, sizeof(*header));
    return true;
}

static const char *get_runs(stream *s, const kvp_pack_header *header, kvp_plain *plain)
{
    const size_t bytes = header->n_runs * sizeof(*plain->runs);

    plain->all = header->all != 0;
    plain->n = (size_t)header->nominal;
    plain->runs = malloc(bytes + 1);
    if (plain->runs == NULL)
        return "out of memory";
    get(s, plain->runs, bytes);
    for (uint32_t i = 0; i < header->n_runs && !s->failed; i++, plain->n_runs++)
        if (!is_next(i > 0 ? &plain->runs[i - 1] : NULL, &plain->runs[i], plain->n))
            return damaged;
    if (s->failed || plain->n == 0 || kvp_pack_bytes(plain, header->n_tokens) != header->bytes)
        return damaged;
    return NULL;
}

/* Reads tokens to `to`, or past them. */
static void get_tokens(stream *s, uint32_t n, int32_t *to)
{
    int32_t other[2];

    if (to != NULL)
        get(s, to, n * sizeof(*to));
    for (uint32_t i = to != NULL ? n : 0; i < (n + 1) / 2 * 2; i++)
        get(s, other, sizeof(*other));
}

static const char *get_state(stream *s, uint64_t size, bool all, kvp_plain *plain,
                             kvp_pack_tokens *tokens)
{
    kvp_pack_header header;
    uint64_t check;
    const char *why;

    if (!get_header(s, size, &header, &check))
        return damaged;
    if ((header.all != 0) != all)
        return all ? "it has one sequence, not all" : "it has all sequences, not one";
    why = get_runs(s, &header, plain);
    if (why != NULL)
        return why;
    if (tokens != NULL && header.n_tokens > tokens->room)
        return "it has more tokens than there is room for";
    get_tokens(s, header.n_tokens, tokens != NULL ? tokens->to : NULL);
    plain->bytes = reserve(plain->n);
    if (plain->bytes == NULL)
        return "out of memory";
    each_part(s, get, plain);
    if (s->failed || kvant_checksum_end(&s->sum) != check)
        return damaged;
    if (tokens != NULL)
        tokens->n = header.n_tokens;
    return NULL;
}

const char *kvp_unpack(const uint8_t *from, size_t n, bool all, kvp_plain *plain)
{
    stream s = { .from = from, .left = n };
    const char *why;

    *plain = (kvp_plain){ 0 };
    why = get_state(&s, n, all, plain, NULL);
    if (why != NULL)
        kvp_plain_free(plain);
    return why;
}

const char *kvp_pack_load(FILE *file, bool all, kvp_plain *plain, kvp_pack_tokens *tokens)
{
    stream s = { .file = file };
    const char *why;

    *plain = (kvp_plain){ 0 };
    why = get_state(&s, kvp_host_file_bytes(file), all, plain, tokens);
    if (why != NULL)
        kvp_plain_free(plain);
    return why;
}

const char *kvp_pack_count(FILE *file, size_t *n_tokens)
{
    stream s = { .file = file };
    kvp_pack_header header;
    uint64_t check;

    if (!get_header(&s, kvp_host_file_bytes(file), &header, &check))
        return damaged;
    *n_tokens = header.n_tokens;
    return NULL;
}
