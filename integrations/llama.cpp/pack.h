/* pack.h - packed states: the bytes of a saved state without the zeros behind its records
 * (format.md, "Saved states").
 *
 * pack.c owns the packed form and its checks, pack_write.c writes it. Both do not know llama.cpp or
 * cache tensors: llama_states.c finds the zeros and restores the states. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "state_format.h"

/* A state as llama.cpp writes and reads it. Pages of its zeros are never touched. */
typedef struct kvp_plain {
    uint8_t *bytes; /* kvp_host_reserve() */
    size_t n;
    kvp_pack_run *runs; /* by place; malloc() */
    uint32_t n_runs, room;
    bool all; /* the state of all sequences */
} kvp_plain;

/* Reserves zeros for n bytes. False when there is no room. */
bool kvp_plain_create(kvp_plain *plain, size_t n);
void kvp_plain_free(kvp_plain *plain);

/* Adds a run that lies behind all runs so far. False when it does not, or without memory. */
bool kvp_plain_add(kvp_plain *plain, size_t at, size_t kept, size_t room);

/* Whether the bytes of a state lie in `plain`. */
bool kvp_plain_has(const kvp_plain *plain, const void *bytes, size_t n);

/* Bytes of the packed state with this number of tokens. `kvp_pack_prefix` counts those before the
 * bytes of the runs. */
size_t kvp_pack_prefix(const kvp_plain *plain, size_t n_tokens);
size_t kvp_pack_bytes(const kvp_plain *plain, size_t n_tokens);

/* The most bytes that are kept of a run. */
size_t kvp_pack_largest_run(const kvp_plain *plain);

/* Writing. llama.cpp writes a state twice: the first time only its runs are found, which `plain`
 * has then. The second time each run is written where `kvp_packing_place` says, and the rest of the
 * state to plain->bytes. */

/* At the same time, one run is read, one is checked and one is imported. While saving, one is made,
 * one is written and one waits. */
#define KVP_PACK_SLOTS 3u

typedef struct kvp_packing {
    kvp_plain *plain;
    const int32_t *tokens;
    size_t n_tokens;
    uint32_t n;       /* runs so far */
    uint64_t next;    /* the place of the next run in the packed state */
    uint8_t *current; /* the run that is being made */
    bool failed;
    uint8_t *to; /* the packed state in memory; NULL: it goes to a file */
    int file;
    char *name;       /* of the file while it is written */
    const char *path; /* its name when it is complete */
    uint8_t *slots;   /* memory for runs that go to the file */
    size_t slot_bytes;
    struct kvp_pack_part { /* by slot */
        uint64_t at;
        size_t n;
    } parts[KVP_PACK_SLOTS];
    /* The thread that writes the file. With `runs`, the following is under the lock. */
    bool runs, ends;
    uint32_t n_written;
    int error; /* errno of a write that failed; 0: none */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} kvp_packing;

/* `kvp_packing_to_memory` has room for kvp_pack_bytes() bytes. `kvp_packing_to_file` writes a file,
 * which takes the place of `path` when it is complete; false with the reason in errno. */
void kvp_packing_to_memory(kvp_packing *p, kvp_plain *plain, uint8_t *to);
bool kvp_packing_to_file(kvp_packing *p, kvp_plain *plain, const int32_t *tokens, size_t n_tokens,
                         const char *path);

/* Returns memory for the `kept` bytes of the next run. NULL: the run is not the one that was
 * found before, and the state cannot be packed. `kvp_packing_placed`: they are written. */
uint8_t *kvp_packing_place(kvp_packing *p, size_t at, size_t kept, size_t room);
void kvp_packing_placed(kvp_packing *p);

/* Writes the rest if `keep` is set and all runs came. False with the reason in errno, which is 0
 * when runs are missing: nothing was written then, as with keep = false. */
bool kvp_packing_end(kvp_packing *p, bool keep);

/* Whether bytes, at least their first 8, begin a packed state. */
bool kvp_is_packed(const void *bytes, size_t n);

/* Tokens of a file, and their number in any case. */
typedef struct kvp_pack_tokens {
    int32_t *to;
    size_t room, n;
} kvp_pack_tokens;

/* A packed state in memory or in a file. */
typedef struct kvp_pack_source {
    const uint8_t *from; /* NULL: it is in the file */
    int file;
    uint64_t n;
} kvp_pack_source;

/* Why a state is refused whose bytes are not as they were written. */
extern const char kvp_pack_damaged[];

/* Reading. A thread reads runs, and another one compares their checksums. Runs lie in `plain` when
 * all of them are read. With `early` the caller receives them one by one while further ones are
 * read, so they lie in a few slots, or in the memory that the state comes from. */
typedef struct kvp_unpacking {
    kvp_plain plain;
    kvp_pack_source source;
    bool early;
    uint64_t first; /* the place of the first run in the source */
    uint8_t *slots; /* NULL: none are needed */
    size_t slot_bytes;
    uint32_t n_seen;           /* runs that the caller has received, in order */
    uint64_t next;             /* the place of the next one */
    bool missed;               /* bytes behind a run were wanted before the run */
    bool began, reads, checks; /* there are such threads */
    pthread_t reader, checker;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Under the lock: the first n_read runs were read, the first n_right of them are right, and the
     * slots of the first n_free of them are free. */
    uint32_t n_read, n_right, n_free;
    bool failed; /* a run cannot be read, or is damaged, or the caller wants no more */
} kvp_unpacking;

/* Changes the form of a state of which all bytes other than runs are there. */
typedef void kvp_unpacking_form(kvp_plain *plain, void *context);

/* Begins to unpack. All bytes other than runs are in u->plain and right when this returns. NULL, or
 * the reason why the state cannot be right; *u is then empty. `all`: the wanted kind of state.
 * `change` (NULL: none) may change u->plain before its runs are read. */
const char *kvp_unpacking_begin(kvp_unpacking *u, const kvp_pack_source *source, bool all,
                                bool early, kvp_pack_tokens *tokens, kvp_unpacking_form *change,
                                void *context);

/* With `early`: waits for the runs that n bytes of u->plain belong to, and puts them there. If they
 * are exactly one run and the caller needs only its `kept` bytes (moves), these may stay elsewhere
 * until the next call. Returns the bytes, or NULL when a run is damaged. */
const uint8_t *kvp_unpacking_wait(kvp_unpacking *u, const uint8_t *bytes, size_t n, bool moves);

/* Whether bytes are of a state whose checksums were compared. */
bool kvp_unpacking_has(const kvp_unpacking *u, const void *bytes, size_t n);

/* Waits for all runs; with `early` for those that the caller received. NULL, or the reason why the
 * state cannot be right. `kvp_unpacking_free` also frees u->plain. */
const char *kvp_unpacking_finish(kvp_unpacking *u);
void kvp_unpacking_free(kvp_unpacking *u);

/* Reads only the number of tokens of a file. */
const char *kvp_pack_count(int file, size_t *n_tokens);
