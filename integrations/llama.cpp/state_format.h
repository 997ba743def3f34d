/* state_format.h - the head of saved rows that are codes (format.md, "Saved states"). state.c
 * writes and reads such rows; `kvant state` finds them in files. */
#ifndef KVP_STATE_FORMAT_H
#define KVP_STATE_FORMAT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

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

/* Bytes of a header and of its lists. */
static inline uint64_t kvp_state_list_bytes(uint32_t n_blocks, uint32_t n_runs)
{
    return sizeof(kvp_state_header) + (uint64_t)n_blocks * sizeof(kvp_state_block) +
           (uint64_t)n_runs * sizeof(kvp_state_run);
}

/* FNV-1a of 64 bits; hash is KVP_FNV_START in the beginning. */
#define KVP_FNV_START 0xcbf29ce484222325u /* as FNV-1a defines it */

static inline uint64_t kvp_fnv1a(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *at = (const unsigned char *)bytes;

    for (size_t i = 0; i < n; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

/* The same with words of 8 bytes, for the checksum that ends a record. n is a multiple of 8. */
static inline uint64_t kvp_fnv1a_words(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *at = (const unsigned char *)bytes;
    uint64_t word;

    for (size_t i = 0; i < n; i += sizeof(word)) {
        memcpy(&word, at + i, sizeof(word));
        hash = (hash ^ word) * 0x100000001b3u;
    }
    return hash;
}

/* The number in `check` for a header and its lists. */
static inline uint64_t kvp_state_check(const kvp_state_header *header, const void *lists)
{
    kvp_state_header plain = *header;

    plain.check = 0;
    return kvp_fnv1a(kvp_fnv1a(KVP_FNV_START, &plain, sizeof(plain)), lists,
                     (size_t)kvp_state_list_bytes(header->n_blocks, header->n_runs) -
                         sizeof(plain));
}

#endif /* KVP_STATE_FORMAT_H */
