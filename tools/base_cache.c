/* base_cache.c - a header, f16's values, the packed reference; mapped, checked, renamed. */
#define _GNU_SOURCE
#include "base_cache.h"

#include "command.h"
#include "fingerprint.h"
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

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
             needed / MIB, there / MIB);
    return hint("name a folder on another disk, or choose fewer --chunks or a smaller -c; without "
                "--base-cache, eval keeps one chunk in memory");
}

bool base_cache_prepare(const char *folder, const base_key *key, size_t n_new)
{
    struct statvfs fs;
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return complain("--base-cache %s: %s", folder, strerror(errno));
    if (statvfs(folder, &fs) != 0 || access(folder, W_OK | X_OK) != 0)
        return complain("--base-cache %s: %s", folder, strerror(errno));
    const double needed = (double)base_bytes(key) * (double)n_new,
                 there = (double)fs.f_bavail * (double)fs.f_frsize;
    return needed <= there || no_room(folder, needed, there);
}

bool base_cache_has(const char *folder, const base_key *key)
{
    char path[4096];
    return folder != NULL && path_of(folder, key, path, sizeof path) && access(path, F_OK) == 0;
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

static bool map_file(base *b, int file, int protection)
{
    void *map = mmap(NULL, b->bytes, protection, MAP_SHARED, file, 0);
    if (map == MAP_FAILED)
        return false;
    b->map = map;
    lay_out(b);
    return true;
}

bool base_load(base *b, const char *folder, const base_key *key)
{
    struct stat about;
    *b = (base){ .key = *key, .bytes = base_bytes(key) };
    if (folder == NULL || !path_of(folder, key, b->path, sizeof b->path))
        return false;
    const int file = open(b->path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    const char *wrong = fstat(file, &about) != 0 || (uint64_t)about.st_size != b->bytes
                            ? "its size is wrong"
                        : !map_file(b, file, PROT_READ) ? "it cannot be mapped"
                                                        : why_unusable(b);
    close(file);
    if (wrong == NULL) {
        memcpy(&b->kv_bytes, (char *)b->map + offsetof(header, kv_bytes), sizeof b->kv_bytes);
        return true;
    }
    fprintf(stderr, "kvant: eval: %s cannot be used, so the f16 run is computed again: %s\n",
            b->path, wrong);
    base_close(b);
    return false;
}

static void temporary_of(const base *b, char *path, size_t room)
{
    snprintf(path, room, "%s.%ld.part", b->path, (long)getpid());
}

static bool create_in_memory(base *b)
{
    const double there = machine_available_memory();
    if (there > 0 && (double)b->bytes > there) {
        complain("eval: the f16 run of a chunk takes %.0f MiB, but only %.0f MiB of memory are "
                 "available",
                 (double)b->bytes / MIB, there / MIB);
        return hint(
            "keep it on disk with --base-cache DIR, or choose a smaller -c or a larger --from");
    }
    void *map = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return complain("eval: out of memory for the f16 run of %llu rows x %llu tokens",
                        (unsigned long long)b->key.n_rows, (unsigned long long)b->key.n_vocab);
    b->map = map;
    lay_out(b);
    return true;
}

/* All blocks are allocated first, so that a full disk is an error here and not a signal while the
 * mapping is written to. */
static bool create_file(base *b)
{
    char path[4128];
    temporary_of(b, path, sizeof path);
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    const int error = file < 0 ? errno : posix_fallocate(file, 0, (off_t)b->bytes);
    const bool ok = error == 0 && map_file(b, file, PROT_READ | PROT_WRITE);
    if (!ok) {
        complain("--base-cache: cannot create %s with %.0f MiB: %s", path, (double)b->bytes / MIB,
                 strerror(error != 0 ? error : errno));
        unlink(path);
    }
    if (file >= 0)
        close(file);
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
    if (rename(path, b->path) == 0)
        return true;
    complain("--base-cache: cannot rename %s: %s", path, strerror(errno));
    unlink(path);
    return false;
}

void base_close(base *b)
{
    char path[4128];
    if (b->map == NULL)
        return;
    const bool unfinished = b->path[0] != 0 && *(const uint64_t *)b->map != MAGIC;
    temporary_of(b, path, sizeof path);
    munmap(b->map, b->bytes);
    if (unfinished)
        unlink(path);
    b->map = NULL;
}
