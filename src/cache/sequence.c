/* sequence.c - the blocks of each sequence: adding, sharing, copying before a write, forgetting. */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "device.h"
#include "tensor.h"

#define FEWEST_ENTRIES 16u /* of a table: a cache line */

kvant_status kvant_sequences_create(kvant_cache *cache)
{
    uint32_t n = cache->params.max_sequences, n_layers = cache->params.n_layers;
    cache->sequences = kvant_alloc(n, sizeof *cache->sequences);
    cache->lengths = kvant_alloc(n, n_layers * sizeof *cache->lengths);
    cache->references = kvant_alloc(cache->n_blocks, sizeof *cache->references);
    cache->n_free = cache->n_blocks;
    KVANT_RETURN_IF(!cache->sequences || !cache->lengths || !cache->references, KVANT_ERR_MEMORY);
    for (uint32_t i = 0; i < n; i++)
        cache->sequences[i].lengths = cache->lengths + (size_t)i * n_layers;
    return KVANT_OK;
}

void kvant_sequences_destroy(kvant_cache *cache)
{
    for (uint32_t i = 0; cache->sequences && i < cache->params.max_sequences; i++)
        kvant_free(cache->sequences[i].table);
    kvant_free(cache->sequences);
    kvant_free(cache->lengths);
    kvant_free(cache->references);
}

/* Makes room for n entries in the table of a sequence. If every sequence had room for all blocks at
 * once, thousands of sequences would take more memory for tables than for tokens. */
static kvant_status make_room(const kvant_cache *cache, kvant_sequence *s, uint32_t n)
{
    const uint32_t twice = s->room < cache->n_blocks / 2 ? 2 * s->room : cache->n_blocks,
                   room = n > twice                ? n
                          : twice > FEWEST_ENTRIES ? twice
                                                   : FEWEST_ENTRIES;
    if (n <= s->room)
        return KVANT_OK;
    int32_t *table = kvant_alloc(room, sizeof *table);
    if (!table)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "out of memory for the blocks of a sequence");
    if (s->table)
        memcpy(table, s->table, s->n_blocks * sizeof *table);
    kvant_free(s->table);
    s->table = table;
    s->room = room;
    return KVANT_OK;
}

kvant_sequence *kvant_sequence_of(const kvant_cache *cache, int32_t sequence)
{
    if (cache && sequence >= 0 && (uint32_t)sequence < cache->params.max_sequences &&
        cache->sequences[sequence].alive)
        return &cache->sequences[sequence];
    kvant_fail(NULL, KVANT_ERR_ARGUMENT, "there is no sequence %d: kvant_sequence_create makes one",
               (int)sequence);
    return NULL;
}

/* Blocks */

static void release(kvant_cache *cache, int32_t block)
{
    if (block == KVANT_NO_BLOCK || --cache->references[block])
        return;
    cache->n_free++;
    kvant_layers_clear(cache, (uint32_t)block);
    if (cache->device->release)
        cache->device->release(cache, (uint32_t)block);
}

static kvant_status take(kvant_cache *cache, int32_t sequence, uint32_t index, int32_t *taken)
{
    uint32_t block = 0;
    if (!cache->n_free)
        return kvant_fail(NULL, KVANT_ERR_FULL,
                          "all %u blocks of 64 tokens are in use: remove a sequence, or set a "
                          "larger max_tokens or max_sequences",
                          (unsigned)cache->n_blocks);
    while (cache->references[block])
        block++;
    KVANT_FORWARD(kvant_layers_assign(cache, block, (uint32_t)sequence, index));
    cache->references[block] = 1;
    cache->n_free--;
    *taken = (int32_t)block;
    return KVANT_OK;
}

/* The slots of a block that hold tokens of the sequence in a layer, a bit each. */
static uint64_t slots_of(const kvant_sequence *s, uint32_t layer, uint32_t index)
{
    const uint32_t first = index * KVANT_PAGE_TOKENS, length = s->lengths[layer];
    const uint32_t n = length <= first ? 0 : length - first;
    return n >= KVANT_PAGE_TOKENS ? UINT64_MAX : ((uint64_t)1 << n) - 1;
}

/* Removes rows that are not tokens of the sequence from a block that only this sequence holds. */
static void forget_rows(kvant_cache *cache, const kvant_sequence *s, uint32_t layer, uint32_t index)
{
    const int32_t block = index < s->n_blocks ? s->table[index] : KVANT_NO_BLOCK;
    if (block != KVANT_NO_BLOCK && cache->references[block] == 1)
        for (uint32_t i = 0; i < 2; i++)
            kvant_block_keep(cache->tensors[2 * layer + i], (uint32_t)block,
                             slots_of(s, layer, index));
}

static void forget_rows_of_all(kvant_cache *cache, const kvant_sequence *s, uint32_t index)
{
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++)
        forget_rows(cache, s, layer, index);
}

/* Replaces a block that the sequence shares by a copy. */
static kvant_status unshare(kvant_cache *cache, int32_t sequence, uint32_t index)
{
    int32_t *entry = &cache->sequences[sequence].table[index], block = KVANT_NO_BLOCK;
    KVANT_FORWARD(take(cache, sequence, index, &block));
    kvant_status status = kvant_layers_copy(cache, (uint32_t)*entry, (uint32_t)block);
    if (status != KVANT_OK) {
        release(cache, block);
        return status;
    }
    release(cache, *entry);
    *entry = block;
    forget_rows_of_all(cache, &cache->sequences[sequence], index);
    return KVANT_OK;
}

kvant_status kvant_sequence_extend(kvant_cache *cache, int32_t sequence, uint32_t layer, uint32_t n)
{
    kvant_sequence *s = &cache->sequences[sequence];
    const uint32_t index = s->lengths[layer] / KVANT_PAGE_TOKENS;
    KVANT_FORWARD(kvant_sequence_reserve(cache, sequence, s->lengths[layer], n));
    forget_rows(cache, s, layer, index);
    /* A block that was shared may have belonged to a sequence that was freed. */
    for (uint32_t i = 0; i < 2 && index < s->n_blocks && s->table[index] != KVANT_NO_BLOCK; i++)
        kvant_block_adopt(cache->tensors[2 * layer + i], (uint32_t)s->table[index],
                          (uint32_t)sequence);
    return KVANT_OK;
}

kvant_status kvant_sequence_reserve(kvant_cache *cache, int32_t sequence, uint32_t first,
                                    uint32_t n)
{
    kvant_sequence *s = &cache->sequences[sequence];
    if (n > cache->params.max_tokens || first > cache->params.max_tokens - n)
        return kvant_fail(NULL, KVANT_ERR_FULL, "the sequence would be longer than max_tokens, %u",
                          (unsigned)cache->params.max_tokens);
    for (uint32_t index = first / KVANT_PAGE_TOKENS; index <= (first + n - 1) / KVANT_PAGE_TOKENS;
         index++) {
        if (index < s->n_blocks) {
            if (s->table[index] == KVANT_NO_BLOCK)
                return kvant_fail(
                    NULL, KVANT_ERR_ARGUMENT,
                    "the block at token %u was dropped, so no row can be stored there",
                    index * KVANT_PAGE_TOKENS);
            if (cache->references[s->table[index]] > 1)
                KVANT_FORWARD(unshare(cache, sequence, index));
        } else {
            KVANT_FORWARD(make_room(cache, s, s->n_blocks + 1));
            KVANT_FORWARD(take(cache, sequence, index, &s->table[s->n_blocks]));
            s->n_blocks++;
        }
    }
    return KVANT_OK;
}

/* Sequences */

static int32_t free_sequence(const kvant_cache *cache)
{
    for (uint32_t i = 0; cache && i < cache->params.max_sequences; i++)
        if (!cache->sequences[i].alive)
            return (int32_t)i;
    kvant_fail(NULL, KVANT_ERR_FULL,
               "all sequences are in use: remove one, or set a larger max_sequences");
    return -1;
}

int32_t kvant_sequence_create(kvant_cache *cache)
{
    int32_t sequence = free_sequence(cache);
    if (sequence >= 0)
        cache->sequences[sequence].alive = true;
    return sequence;
}

int32_t kvant_sequence_fork(kvant_cache *cache, int32_t sequence)
{
    const kvant_sequence *from = kvant_sequence_of(cache, sequence);
    int32_t to = from ? kvant_sequence_create(cache) : -1;
    if (to < 0)
        return -1;
    kvant_sequence *s = &cache->sequences[to];
    if (make_room(cache, s, from->n_blocks) != KVANT_OK) {
        s->alive = false;
        return -1;
    }
    s->n_blocks = from->n_blocks;
    if (s->n_blocks)
        memcpy(s->table, from->table, from->n_blocks * sizeof *s->table);
    memcpy(s->lengths, from->lengths, cache->params.n_layers * sizeof *s->lengths);
    for (uint32_t i = 0; i < s->n_blocks; i++)
        if (s->table[i] != KVANT_NO_BLOCK)
            cache->references[s->table[i]]++;
    return to;
}

/* Removes all blocks of a sequence except the first n. */
static void shorten(kvant_cache *cache, kvant_sequence *s, uint32_t n)
{
    while (s->n_blocks > n)
        release(cache, s->table[--s->n_blocks]);
}

void kvant_sequence_trim(kvant_cache *cache, int32_t sequence)
{
    kvant_sequence *s = kvant_sequence_of(cache, sequence);
    uint32_t longest = 0;
    for (uint32_t layer = 0; s && layer < cache->params.n_layers; layer++)
        longest = s->lengths[layer] > longest ? s->lengths[layer] : longest;
    if (s)
        shorten(cache, s, (uint32_t)kvant_plan_blocks(longest));
}

void kvant_sequence_free(kvant_cache *cache, int32_t sequence)
{
    kvant_sequence *s = kvant_sequence_of(cache, sequence);
    if (!s)
        return;
    shorten(cache, s, 0);
    memset(s->lengths, 0, cache->params.n_layers * sizeof *s->lengths);
    s->alive = false;
}

uint32_t kvant_sequence_length(const kvant_cache *cache, int32_t sequence, uint32_t layer)
{
    const kvant_sequence *s = kvant_sequence_of(cache, sequence);
    return s && layer < cache->params.n_layers ? s->lengths[layer] : 0;
}

kvant_status kvant_sequence_truncate(kvant_cache *cache, int32_t sequence, uint32_t length)
{
    kvant_sequence *s = kvant_sequence_of(cache, sequence);
    KVANT_RETURN_IF(!s, KVANT_ERR_ARGUMENT);
    shorten(cache, s, (uint32_t)kvant_plan_blocks(length));
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++) {
        const uint32_t kept = s->lengths[layer] < length ? s->lengths[layer] : length;
        for (uint32_t i = 0; i < 2; i++)
            kvant_open_rewind(cache->tensors[2 * layer + i], (uint32_t)sequence,
                              s->lengths[layer] - kept);
        s->lengths[layer] = kept;
    }
    forget_rows_of_all(cache, s, length / KVANT_PAGE_TOKENS);
    return KVANT_OK;
}

/* An empty sequence begins with n blocks that were dropped. */
static kvant_status begin_late(const kvant_cache *cache, kvant_sequence *s, uint32_t n)
{
    if (n > cache->params.max_tokens / KVANT_PAGE_TOKENS)
        return kvant_fail(NULL, KVANT_ERR_FULL, "the sequence would be longer than max_tokens, %u",
                          (unsigned)cache->params.max_tokens);
    KVANT_FORWARD(make_room(cache, s, n));
    for (uint32_t i = 0; i < n; i++)
        s->table[i] = KVANT_NO_BLOCK;
    s->n_blocks = n;
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++)
        s->lengths[layer] = n * KVANT_PAGE_TOKENS;
    return KVANT_OK;
}

kvant_status kvant_sequence_drop(kvant_cache *cache, int32_t sequence, uint32_t n_tokens)
{
    kvant_sequence *s = kvant_sequence_of(cache, sequence);
    KVANT_RETURN_IF(!s, KVANT_ERR_ARGUMENT);
    if (s->n_blocks == 0)
        return begin_late(cache, s, n_tokens / KVANT_PAGE_TOKENS);
    for (uint32_t i = 0; i < n_tokens / KVANT_PAGE_TOKENS && i < s->n_blocks; i++) {
        release(cache, s->table[i]);
        s->table[i] = KVANT_NO_BLOCK;
    }
    return KVANT_OK;
}
