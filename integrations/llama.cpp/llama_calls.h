/* llama_calls.h - llama.cpp's functions for states, which llama_states.c finds and calls, and the
 * attempts to restore a state (restoring.c). */
#pragma once

#include "pack.h"

/* llama.cpp's functions. */
typedef struct kvp_llama_calls {
    size_t (*get_size)(void *context);
    size_t (*get_data)(void *context, uint8_t *to, size_t size);
    size_t (*set_data)(void *context, const uint8_t *from, size_t size);
    bool (*load_file)(void *context, const char *path, int32_t *tokens, size_t room, size_t *n);
    bool (*save_file)(void *context, const char *path, const int32_t *tokens, size_t n);
    size_t (*seq_get_size)(void *context, int32_t seq, uint32_t flags);
    size_t (*seq_get_data)(void *context, uint8_t *to, size_t size, int32_t seq, uint32_t flags);
    size_t (*seq_set_data)(void *context, const uint8_t *from, size_t size, int32_t seq,
                           uint32_t flags);
    size_t (*seq_load_file)(void *context, const char *path, int32_t seq, int32_t *tokens,
                            size_t room, size_t *n);
    size_t (*seq_save_file)(void *context, const char *path, int32_t seq, const int32_t *tokens,
                            size_t n);
    void *(*get_memory)(const void *context);
    bool (*memory_seq_rm)(void *memory, int32_t seq, int32_t first, int32_t end);
    void (*memory_clear)(void *memory, bool data);
    int32_t (*memory_seq_pos_max)(void *memory, int32_t seq); /* NULL: an older llama.cpp */
    uint32_t (*n_seq_max)(const void *context);               /* likewise */
} kvp_llama_calls;
extern kvp_llama_calls kvp_llama;

/* Which state of a context. */
typedef struct kvp_which {
    void *context;
    bool all;
    int32_t seq;
    uint32_t flags;
} kvp_which;

/* restoring.c. A program's state is restored between the first two functions. `kvp_restoring_end`
 * returns whether all rows were restored. Otherwise it reports the reason, and takes back what
 * llama.cpp restored. `kvp_restoring_report` prints why a state is not restored. */
void kvp_restoring_begin(const kvp_which *w);
bool kvp_restoring_end(const kvp_which *w, const char *what);
void kvp_restoring_report(const char *what, const char *why);

/* Restores a state of llama.cpp's form. Returns the bytes that were read; 0 after an error. */
size_t kvp_restoring_plain(const kvp_which *w, const uint8_t *from, size_t size, const char *what);

/* Restores a packed state. All runs are checked before llama.cpp sees it, unless no sequence has
 * tokens, so that a damaged state takes nothing away. */
bool kvp_restoring_packed(const kvp_which *w, const kvp_pack_source *source,
                          kvp_pack_tokens *tokens, const char *what);
