/* base_cache.c - a header, f16's values, the packed reference; mapped, checked, renamed. */
#include "base_cache.h"

#include "command.h"
#include "fingerprint.h"
#include "os.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "KVATBASE" on little-endian machines. A machine of another byte order reads another number. */
#define MAGIC 0x455341425456414bu
#define VERSION 2u
#define MIB 1048576.0

/* Fields of 8 bytes only, so there is no padding. `checksum` covers the fields before it and
 * everything after the header. */
typedef struct header {
    uint64_t magic, version;
    base_key key;
    double kv_bytes;
    uint64_t bytes, checksum;
} header;

/* The size of a chunk's file; 0 when the sizes are impossible. */
static size_t base_bytes(const base_key *key)
{
    const size_t reference = score_reference_bytes(key->n_rows, key->n_vocab);
    return reference > 0 ? sizeof(header) + key->n_rows * sizeof(score_value) + reference : 0;
}

static bool path_of(const char *folder, const base_key *key, char *path, size_t room)
{
    const uint64_t name = fingerprint_words(FINGERPRINT_START, key, sizeof *key);
    if (snprintf(path, room, "%s/%016llx.kvbase", folder, (unsigned long long)name) < (int)room - 8)
        return true;
    return complain("--base-cache: the path is too long");
}

static bool no_room(const char *folder, double needed, double there)
{
    complain("--base-cache %s: the f16 runs need %.0f MiB, but only %.0f MiB are free", folder,
             needed / MIB, (double)there / MIB);
    return hint("name a folder on another disk, or choose fewer --chunks or a smaller -c; without "
                "--base-cache, eval keeps one chunk in memory");
}

bool base_cache_prepare(const char *folder, const base_key *key, size_t n_new)
{
    double there;
    if (!os_make_folder(folder) || !os_free_bytes(folder, &there) || !os_can_write_to(folder))
        return complain("--base-cache %s: %s", folder, strerror(errno));
    const double needed = (double)base_bytes(key) * (double)n_new;
    return needed <= there || no_room(folder, needed, there);
}

bool base_cache_has(const char *folder, const base_key *key)
{
    char path[4096];
    return folder != NULL && path_of(folder, key, path, sizeof path) && kvant_os_exists(path);
}

static void lay_out(base *b)
{
    b->values = (score_value *)(void *)((char *)b->map + sizeof(header));
    b->reference = score_reference_at(b->values + b->key.n_rows, b->key.n_rows, b->key.n_vocab);
}

static uint64_t checksum_of(const base *b, const header *h)
{
    const uint64_t sum = fingerprint_words(FINGERPRINT_START, h, offsetof(header, checksum));
    return fingerprint_words(sum, b->values, b->bytes - sizeof *h);
}

/* Returns why the file cannot be used, or NULL when it can. */
static const char *why_unusable(const base *b)
{
    header h;
    memcpy(&h, b->map, sizeof h);
    if (h.magic != MAGIC)
        return "it is not a file that kvant eval --base-cache made";
    if (h.version != VERSION)
        return "another version of kvant made it";
    if (h.bytes != b->bytes || memcmp(&h.key, &b->key, sizeof h.key) != 0)
        return "it belongs to another model, text or runtime";
    return h.checksum != checksum_of(b, &h) ? "its checksum does not match" : NULL;
}

static bool use_map(base *b, void *map)
{
    b->map = map;
    if (map != NULL)
        lay_out(b);
    return map != NULL;
}

/* A base that was loaded is only read. */
static void *map_to_read(const base *b, int file)
{
    return (void *)(uintptr_t)kvant_os_map_file(file, b->bytes);
}

bool base_load(base *b, const char *folder, const base_key *key)
{
    uint64_t size = 0;
    int file;
    *b = (base){ .key = *key, .bytes = base_bytes(key) };
    if (folder == NULL || !path_of(folder, key, b->path, sizeof b->path))
        return false;
    if (!kvant_os_open(b->path, &file))
        return false;
    const char *wrong = !kvant_os_size(file, &size) || size != b->bytes ? "its size is wrong"
                        : !use_map(b, map_to_read(b, file))             ? "it cannot be mapped"
                                                                        : why_unusable(b);
    kvant_os_close(file);
    if (wrong == NULL) {
        memcpy(&b->kv_bytes, (char *)b->map + offsetof(header, kv_bytes), sizeof b->kv_bytes);
        return true;
    }
    report_line("kvant: ", "eval: %s cannot be used, so the f16 run is computed again: %s", b->path,
                wrong);
    base_close(b);
    return false;
}

static void temporary_of(const base *b, char *path, size_t room)
{
    snprintf(path, room, "%s.%llu.part", b->path, (unsigned long long)kvant_os_process());
}

static bool create_in_memory(base *b)
{
    size_t there, total;
    kvant_os_memory(&there, &total);
    if (there > 0 && b->bytes > there) {
        complain("eval: the f16 run of a chunk takes %.0f MiB, but only %.0f MiB of memory are "
                 "available",
                 (double)b->bytes / MIB, (double)there / MIB);
        return hint(
            "keep it on disk with --base-cache DIR, or choose a smaller -c or a larger --from");
    }
    return use_map(b, kvant_os_map_memory(b->bytes)) ||
           complain("eval: out of memory for the f16 run of %llu rows x %llu tokens",
                    (unsigned long long)b->key.n_rows, (unsigned long long)b->key.n_vocab);
}

/* All blocks are allocated first, so that a full disk is an error here and not a signal while the
 * mapping is written to. */
static bool create_file(base *b)
{
    char path[4128];
    int file;
    temporary_of(b, path, sizeof path);
    kvant_os_remove(path); /* of a process that had this number and was killed */
    const bool created = kvant_os_create(path, &file);
    const bool ok =
        created && os_take_room(file, b->bytes) && use_map(b, os_map_to_write(file, b->bytes));
    if (!ok)
        complain("--base-cache: cannot create %s with %.0f MiB: %s", path, (double)b->bytes / MIB,
                 strerror(errno));
    if (created)
        kvant_os_close(file);
    if (created && !ok)
        kvant_os_remove(path);
    return ok;
}

bool base_create(base *b, const char *folder, const base_key *key)
{
    *b = (base){ .key = *key, .bytes = base_bytes(key) };
    if (b->bytes == 0)
        return complain("eval: %llu rows x %llu tokens are too many: choose fewer --chunks",
                        (unsigned long long)key->n_rows, (unsigned long long)key->n_vocab);
    if (folder == NULL)
        return create_in_memory(b);
    return path_of(folder, key, b->path, sizeof b->path) && create_file(b);
}

bool base_publish(base *b)
{
    if (b->path[0] == 0)
        return true;
    header h = { .magic = MAGIC,
                 .version = VERSION,
                 .key = b->key,
                 .kv_bytes = b->kv_bytes,
                 .bytes = b->bytes };
    char path[4128];
    temporary_of(b, path, sizeof path);
    h.checksum = checksum_of(b, &h);
    memcpy(b->map, &h, sizeof h);
    if (kvant_os_replace(path, b->path))
        return true;
    complain("--base-cache: cannot rename %s: %s", path, strerror(errno));
    kvant_os_remove(path);
    return false;
}

void base_close(base *b)
{
    char path[4128];
    if (b->map == NULL)
        return;
    const bool unfinished = b->path[0] != 0 && *(const uint64_t *)b->map != MAGIC;
    temporary_of(b, path, sizeof path);
    kvant_os_unmap(b->map, b->bytes);
    if (unfinished)
        kvant_os_remove(path);
    b->map = NULL;
}
