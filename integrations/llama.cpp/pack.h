/* pack.h - packed states: the bytes of a saved state without the zeros behind its records
 * (format.md, "Saved states").
 *
 * This file owns the packed form in memory and in files, and its checks. It does not know llama.cpp
 * or cache tensors: llama_states.c finds the zeros and restores the states. */
#ifndef KVP_PACK_H
#define KVP_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

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

/* Bytes of the packed state with this number of tokens. */
size_t kvp_pack_bytes(const kvp_plain *plain, size_t n_tokens);

/* `kvp_pack` writes kvp_pack_bytes() bytes. `kvp_pack_save` writes a file, which takes the place of
 * `path` when it is complete; false with the reason in errno. */
void kvp_pack(const kvp_plain *plain, uint8_t *to);
bool kvp_pack_save(const kvp_plain *plain, const int32_t *tokens, size_t n_tokens,
                   const char *path);

/* Whether bytes, at least their first 8, begin a packed state. */
bool kvp_is_packed(const void *bytes, size_t n);

/* Unpacks a state, whose checksum is compared. NULL, or the reason why it cannot be right; *plain
 * is then empty. `all`: the wanted kind of state. */
const char *kvp_unpack(const uint8_t *from, size_t n, bool all, kvp_plain *plain);

/* Tokens of a file, and their number in any case. */
typedef struct kvp_pack_tokens {
    int32_t *to;
    size_t room, n;
} kvp_pack_tokens;

/* The same from a file, behind its magic. `kvp_pack_count` reads only the number of tokens. */
const char *kvp_pack_load(FILE *file, bool all, kvp_plain *plain, kvp_pack_tokens *tokens);
const char *kvp_pack_count(FILE *file, size_t *n_tokens);

#endif /* KVP_PACK_H */
