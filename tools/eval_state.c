/* eval_state.c - header and records of --resume. */
#include "eval_state.h"

#include "command.h"
#include "fingerprint.h"
#include "os.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC 0x4554415453564b00u /* another number on machines of another byte order */
#define VERSION 2u

/* Fields of 8 bytes only, so there is no padding. */
typedef struct header {
    uint64_t magic, version;
    base_key key; /* tokens 0 */
    uint64_t own; /* checksum of the fields before */
} header;

typedef struct record {
    uint64_t config, tokens;
    double kv_bytes;
} record;

/* A record, its values, and the checksum of both. */
static size_t record_size(size_t n_rows)
{
    return sizeof(record) + n_rows * sizeof(score_value) + sizeof(uint64_t);
}

static header make_header(const base_key *key)
{
    header h = { .magic = MAGIC, .version = VERSION, .key = *key };
    h.key.tokens = 0;
    h.own = fingerprint_words(FINGERPRINT_START, &h, offsetof(header, own));
    return h;
}

static bool refuse(const char *path, const char *why)
{
    complain("--resume %s: %s", path, why);
    return hint("name another file, or remove this one");
}

static bool check_header(const char *path, const header *h, const base_key *key)
{
    const header own = make_header(key);
    if (h->magic != MAGIC)
        return refuse(path, "this is not a file that --resume made");
    if (h->version != VERSION)
        return refuse(path, "another version of kvant made it");
    if (h->own != fingerprint_words(FINGERPRINT_START, h, offsetof(header, own)))
        return refuse(path, "its header is damaged");
    if (h->key.model != own.key.model || h->key.n_vocab != own.key.n_vocab)
        return refuse(path, "it belongs to another model");
    if (h->key.runtime != own.key.runtime)
        return refuse(path, "it belongs to another llama.cpp runtime or another kind of CPU");
    if (h->own != own.own)
        return refuse(path,
                      "it belongs to another command, context, batch, --from or number of needles");
    return true;
}

static bool is_intact(const eval_state *s, const unsigned char *r)
{
    const size_t n = s->record_bytes - sizeof(uint64_t);
    uint64_t sum;
    memcpy(&sum, r + n, sizeof sum);
    return sum == fingerprint_words(FINGERPRINT_START, r, n);
}

/* Keeps the intact records. Damaged ones are computed again, and written after the intact ones. */
static bool read_records(eval_state *s, uint64_t size)
{
    const uint64_t n = (size - sizeof(header)) / s->record_bytes;
    s->end = sizeof(header) + n * s->record_bytes;
    s->records = n > 0 ? malloc(n * s->record_bytes) : NULL;
    if (n > 0 && (s->records == NULL ||
                  !kvant_os_read_at(s->file, s->records, n * s->record_bytes, sizeof(header))))
        return refuse(s->path, s->records == NULL ? "out of memory" : strerror(errno));
    for (uint64_t i = 0; i < n; i++) {
        const unsigned char *r = s->records + i * s->record_bytes;
        if (is_intact(s, r))
            memmove(s->records + s->n_records++ * s->record_bytes, r, s->record_bytes);
    }
    const bool torn = s->end != size;
    if (s->n_records < n || torn)
        report_line("kvant: ", "--resume %s: %llu damaged records are computed again", s->path,
                    (unsigned long long)(n - s->n_records + torn));
    return true;
}

/* Two runs would write to the same place. */
static bool lock(eval_state *s)
{
    return os_lock(s->file) ||
           refuse(s->path, errno == EWOULDBLOCK ? "another kvant is using it" : strerror(errno));
}

static bool start(eval_state *s, const base_key *key)
{
    const header h = make_header(key);
    s->end = sizeof h;
    if (kvant_os_write_at(s->file, &h, sizeof h, 0) && kvant_os_flush(s->file))
        return true;
    return refuse(s->path, strerror(errno));
}

bool eval_state_open(eval_state *s, const char *path, const base_key *key)
{
    uint64_t size = 0;
    header h;
    *s = (eval_state){
        .path = path, .file = -1, .n_rows = key->n_rows, .record_bytes = record_size(key->n_rows)
    };
    if (path == NULL)
        return true;
    if (!os_open_or_create(path, &s->file))
        return refuse(path, strerror(errno));
    if (!lock(s))
        return false;
    if (!kvant_os_size(s->file, &size)) /* no other run changes it any more */
        return refuse(path, errno == EINVAL ? "it is not a regular file" : strerror(errno));
    if (size == 0)
        return start(s, key);
    if (size < sizeof h || !kvant_os_read_at(s->file, &h, sizeof h, 0))
        return refuse(path, "this is not a file that --resume made");
    return check_header(path, &h, key) && read_records(s, size);
}

void eval_state_close(eval_state *s)
{
    if (s->path != NULL && s->file >= 0)
        kvant_os_close(s->file);
    free(s->records);
    *s = (eval_state){ .file = -1 };
}

bool eval_state_find(const eval_state *s, uint64_t config, uint64_t tokens, double *kv_bytes,
                     score_value *values)
{
    for (size_t i = 0; i < s->n_records; i++) {
        const unsigned char *bytes = s->records + i * s->record_bytes;
        record r;
        memcpy(&r, bytes, sizeof r);
        if (r.config != config || r.tokens != tokens)
            continue;
        *kv_bytes = r.kv_bytes;
        memcpy(values, bytes + sizeof r, s->n_rows * sizeof *values);
        return true;
    }
    return false;
}

bool eval_state_add(eval_state *s, uint64_t config, uint64_t tokens, double kv_bytes,
                    const score_value *values)
{
    const record r = { config, tokens, kv_bytes };
    const size_t n = s->record_bytes - sizeof(uint64_t);
    if (s->path == NULL)
        return true;
    unsigned char *bytes = malloc(s->record_bytes);
    if (bytes == NULL)
        return complain("--resume: out of memory");
    memcpy(bytes, &r, sizeof r);
    memcpy(bytes + sizeof r, values, s->n_rows * sizeof *values);
    const uint64_t sum = fingerprint_words(FINGERPRINT_START, bytes, n);
    memcpy(bytes + n, &sum, sizeof sum);
    const bool ok =
        kvant_os_write_at(s->file, bytes, s->record_bytes, s->end) && kvant_os_flush(s->file);
    free(bytes);
    if (ok) {
        s->end += s->record_bytes;
        return true;
    }
    complain("--resume %s: %s", s->path, strerror(errno));
    hint("it keeps all complete results: make room and give the same command again");
    if (!os_resize(s->file, s->end))
        complain("--resume %s: %s", s->path,
                 strerror(errno)); /* the torn record's checksum will tell */
    return false;
}
