/* base_cache.h - the reference of one chunk: the distributions of the f16 cache, in memory or in a
 * file of a folder that the user named. The next evaluation of the same chunk reads the file.
 *
 * A file belongs to one chunk. It is sized before anything is computed, filled through a mapping
 * (references may be larger than memory), and gets its name when it is complete. It is used when
 * its header names this model, chunk, cut and runtime and its checksum is right. Otherwise the
 * reference is computed again, after a message.
 */
#pragma once

#include "score.h"

/* All that the f16 run of a chunk depends on. */
typedef struct base_key {
    uint64_t model, runtime, tokens; /* fingerprints */
    uint64_t n_ctx, n_batch, first;  /* positions first .. first + n_rows - 1 are scored */
    uint64_t n_rows, n_vocab;
} base_key;

typedef struct base {
    base_key key;
    score_reference reference;
    score_value *values; /* f16's own */
    double kv_bytes;
    void *map;
    size_t bytes;
    char path[4096]; /* "" in memory */
} base;

/* Makes the folder if it does not exist and checks that its disk has room for n_new more chunks.
 * False after complaining. */
bool base_cache_prepare(const char *folder, const base_key *key, size_t n_new);

/* Whether there is a file for the key, good or bad. */
bool base_cache_has(const char *folder, const base_key *key);

/* Opens what an earlier run left. False when there is nothing, or, after saying so, nothing
 * usable. */
bool base_load(base *b, const char *folder, const base_key *key);

/* An empty one to fill (reference, values, kv_bytes): in the folder, or in memory when it is NULL.
 * False after complaining. */
bool base_create(base *b, const char *folder, const base_key *key);

/* Gives the file of base_create its checksum and name. Nothing to do in memory. */
bool base_publish(base *b);

/* Frees it; an unpublished file is removed. */
void base_close(base *b);
