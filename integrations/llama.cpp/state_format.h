/* state_format.h - the heads of saved rows that are codes, and of packed states (format.md, "Saved
 * states"). state.c and pack.c write and read them; `kvant state` finds them in files. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../src/base/fnv.h"

/* The first number is an fp16 NaN. A llama.cpp without kvant takes the bytes for fp16 rows, and
 * every token that sees the first row then gets NaN instead of nonsense. */
#define KVP_STATE_MAGIC "\xff\x7fKVSTA1"
#define KVP_STATE_MAGIC_BYTES 8u /* without the zero that ends the string */

typedef struct kvp_state_header {
    char magic[KVP_STATE_MAGIC_BYTES];
    uint64_t bytes; /* of this header, the lists and the record */
    uint64_t check; /* of the header, with 0 here, and the lists */
    uint32_t n_cells, n_blocks, n_runs, zero;
} kvp_state_header;
_Static_assert(sizeof(kvp_state_header) == 40, "format.md");

/* A block of the record: the slots that it holds, and its place in its sequence. */
typedef struct kvp_state_block {
    uint64_t slots;
    uint32_t index, zero;
} kvp_state_block;
_Static_assert(sizeof(kvp_state_block) == 16, "format.md");

/* The next `count` cells lie in the slots from `first` on of a block. */
typedef struct kvp_state_run {
    uint32_t block;
    uint8_t first, count;
    uint16_t zero;
} kvp_state_run;
_Static_assert(sizeof(kvp_state_run) == 8, "format.md");

/* The begin of a packed state. Its runs follow, tokens, zeros up to a multiple of 8 bytes,
 * llama.cpp's state without its runs, and then the runs without their zeros. llama.cpp does not
 * know the magic. */
#define KVP_PACK_MAGIC "\xffKVPACK1"

typedef struct kvp_pack_header {
    char magic[KVP_STATE_MAGIC_BYTES];
    uint64_t bytes;   /* of the whole packed state */
    uint64_t nominal; /* of llama.cpp's state */
    uint64_t check;   /* of all bytes before the runs', with 0 here */
    uint32_t n_runs, n_tokens;
    uint32_t all; /* 1: the state of all sequences; 0: of one */
    uint32_t zero;
} kvp_pack_header;
_Static_assert(sizeof(kvp_pack_header) == 48, "format.md");

/* `room` bytes of llama.cpp's state. They begin with `kept` bytes, a head, lists and a record, and
 * zeros follow. */
typedef struct kvp_pack_run {
    uint64_t at, kept, room;
    uint64_t check; /* of the head, the lists and the record's own checksum */
} kvp_pack_run;
_Static_assert(sizeof(kvp_pack_run) == 32, "format.md");

/* Bytes of the header, the runs and the tokens. */
static inline uint64_t kvp_pack_head_bytes(uint32_t n_runs, uint32_t n_tokens)
{
    return sizeof(kvp_pack_header) + (uint64_t)n_runs * sizeof(kvp_pack_run) +
           ((uint64_t)n_tokens + 1) / 2 * 8;
}

/* Bytes of a header and of its lists. */
static inline uint64_t kvp_state_list_bytes(uint32_t n_blocks, uint32_t n_runs)
{
    return sizeof(kvp_state_header) + (uint64_t)n_blocks * sizeof(kvp_state_block) +
           (uint64_t)n_runs * sizeof(kvp_state_run);
}

/* The number in `check` for a header and its lists. */
static inline uint64_t kvp_state_check(const kvp_state_header *header, const void *lists)
{
    kvp_state_header plain = *header;

    plain.check = 0;
    return kvant_fnv1a(kvant_fnv1a(KVANT_FNV_START, &plain, sizeof(plain)), lists,
                       (size_t)kvp_state_list_bytes(header->n_blocks, header->n_runs) -
                           sizeof(plain));
}

/* The number in `check` of a run with these lists. A record ends with its own checksum, so its
 * bytes are hashed once. */
static inline uint64_t kvp_pack_run_check(const uint8_t *run, size_t lists, size_t kept)
{
    kvant_checksum sum;

    kvant_checksum_begin(&sum);
    kvant_checksum_add(&sum, run, lists);
    kvant_checksum_add(&sum, run + kept - sizeof(uint64_t), sizeof(uint64_t));
    return kvant_checksum_end(&sum);
}
