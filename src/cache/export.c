/* export.c - exports blocks of a sequence, of all layers, and appends exported blocks to one.
 * Exported blocks are their number of tokens, then for every layer and role the size of a record
 * (record.c) and the record. Damaged bytes are refused before anything changes. */
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "../base/alloc.h"
#include "../base/error.h"
#include "device.h"
#include "tensor.h"

typedef struct exports {
    kvant_block_slots *blocks;
    uint32_t *ages;
    uint32_t n;
    uint64_t tokens;
} exports;

static kvant_status exports_create(exports *e, uint32_t n)
{
    *e = (exports){ .blocks = kvant_alloc(n, sizeof *e->blocks),
                    .ages = kvant_alloc(n, sizeof *e->ages),
                    .n = n };
    return e->blocks && e->ages ? KVANT_OK : KVANT_ERR_MEMORY;
}

static void exports_free(exports *e)
{
    kvant_free(e->blocks);
    kvant_free(e->ages);
}

/* Lists n blocks of a sequence of `length` tokens. */
static void exports_list(exports *e, const kvant_sequence *s, uint32_t first, uint32_t length)
{
    const uint32_t begin = first * KVANT_PAGE_TOKENS;
    e->tokens = 0;
    for (uint32_t i = 0; i < e->n; i++) {
        const uint32_t left = length - begin - i * KVANT_PAGE_TOKENS,
                       tokens = left < KVANT_PAGE_TOKENS ? left : KVANT_PAGE_TOKENS;
        e->blocks[i] = (kvant_block_slots){ UINT64_MAX >> (KVANT_PAGE_TOKENS - tokens),
                                            (uint32_t)s->table[first + i] };
        e->ages[i] = left - tokens;
        e->tokens += tokens;
    }
}

/* Checks that a sequence has n blocks from the first on, with the same tokens in every layer. */
static kvant_status check_blocks(const kvant_cache *cache, const kvant_sequence *s, uint32_t first,
                                 uint32_t n)
{
    const uint32_t length = s->lengths[0];
    for (uint32_t layer = 1; layer < cache->params.n_layers; layer++)
        if (s->lengths[layer] != length)
            return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                              "layers of the sequence have different lengths: append the same "
                              "tokens to all layers");
    KVANT_RETURN_IF(!n, KVANT_ERR_ARGUMENT);
    for (uint32_t i = 0, index; i < n; i++) {
        index = first + i;
        if (index < first || index >= s->n_blocks || s->table[index] == KVANT_NO_BLOCK ||
            length <= index * KVANT_PAGE_TOKENS)
            return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                              "the sequence has no block %u: it was dropped, or no token is that "
                              "far",
                              (unsigned)index);
    }
    return KVANT_OK;
}

static kvant_status exports_find(const kvant_cache *cache, int32_t sequence, uint32_t first,
                                 uint32_t n, exports *e)
{
    const kvant_sequence *s = kvant_sequence_of(cache, sequence);
    KVANT_RETURN_IF(!s, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(check_blocks(cache, s, first, n));
    const kvant_status status = exports_create(e, n);
    if (status == KVANT_OK)
        exports_list(e, s, first, s->lengths[0]);
    return status;
}

static kvant_status size_of(const kvant_cache *cache, const exports *e, size_t *bytes)
{
    *bytes = sizeof e->tokens;
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++) {
        size_t record;
        KVANT_FORWARD(kvant_tensor_record_size(cache->tensors[i], e->blocks, e->n, &record));
        *bytes += sizeof(uint64_t) + record;
    }
    return KVANT_OK;
}

kvant_status kvant_sequence_export_size(const kvant_cache *cache, int32_t sequence, uint32_t first,
                                        uint32_t n_blocks, size_t *bytes)
{
    exports e = { 0 };
    KVANT_RETURN_IF(!bytes, KVANT_ERR_ARGUMENT);
    kvant_status status = exports_find(cache, sequence, first, n_blocks, &e);
    if (status == KVANT_OK)
        status = size_of(cache, &e, bytes);
    exports_free(&e);
    return status;
}

static kvant_status export_layers(const kvant_cache *cache, const exports *e, uint8_t *at,
                                  size_t bytes)
{
    size_t needed;
    KVANT_FORWARD(size_of(cache, e, &needed));
    if (bytes != needed)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "the exported blocks take %zu bytes, not %zu: "
                          "kvant_sequence_export_size says how many",
                          needed, bytes);
    memcpy(at, &e->tokens, sizeof e->tokens);
    at += sizeof e->tokens;
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++) {
        size_t record;
        KVANT_FORWARD(kvant_tensor_record_size(cache->tensors[i], e->blocks, e->n, &record));
        memcpy(at, &(uint64_t){ record }, sizeof(uint64_t));
        at += sizeof(uint64_t);
        KVANT_FORWARD(kvant_record_export(cache->tensors[i], e->blocks, e->n, e->ages, at, record,
                                          cache->params.n_threads));
        at += record;
    }
    return KVANT_OK;
}

kvant_status kvant_sequence_export(const kvant_cache *cache, int32_t sequence, uint32_t first,
                                   uint32_t n_blocks, void *data, size_t bytes)
{
    exports e = { 0 };
    KVANT_RETURN_IF(!data, KVANT_ERR_ARGUMENT);
    kvant_status status = exports_find(cache, sequence, first, n_blocks, &e);
    if (status == KVANT_OK)
        status = export_layers(cache, &e, data, bytes);
    exports_free(&e);
    return status;
}

static kvant_status damaged(void)
{
    return kvant_fail(NULL, KVANT_ERR_FORMAT, "exported block: its sizes do not add up");
}

static kvant_status check_layers(const kvant_cache *cache, const exports *e, const uint8_t *at,
                                 size_t left, kvant_record *records)
{
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++) {
        uint64_t size;
        if (left < sizeof size)
            return damaged();
        memcpy(&size, at, sizeof size);
        at += sizeof size;
        left -= sizeof size;
        if (size > left)
            return damaged();
        KVANT_FORWARD(
            kvant_record_check(cache->tensors[i], e->blocks, e->n, at, (size_t)size, &records[i]));
        at += size;
        left -= (size_t)size;
    }
    return left ? damaged() : KVANT_OK;
}

/* Checks the records of all layers first. Otherwise the transforms of a damaged export would serve
 * later rows of the cache. */
static kvant_status import_layers(kvant_cache *cache, const exports *e, const uint8_t *at,
                                  size_t left)
{
    kvant_record *records = kvant_alloc(2 * (size_t)cache->params.n_layers, sizeof *records);
    KVANT_RETURN_IF(!records, KVANT_ERR_MEMORY);
    kvant_status status = check_layers(cache, e, at, left, records);
    for (uint32_t i = 0; i < 2 * cache->params.n_layers && status == KVANT_OK; i++)
        status = kvant_record_import(cache->tensors[i], e->blocks, e->n, &records[i],
                                     cache->params.n_threads);
    kvant_free(records);
    return status;
}

/* Appends `tokens` tokens to a sequence of whole blocks. On an error the caller removes the
 * blocks. */
static kvant_status import_blocks(kvant_cache *cache, int32_t sequence, uint32_t tokens,
                                  const uint8_t *at, size_t left)
{
    kvant_sequence *s = &cache->sequences[sequence];
    const uint32_t first = s->n_blocks, length = first * KVANT_PAGE_TOKENS;
    exports e;
    KVANT_FORWARD(kvant_sequence_reserve(cache, sequence, length, tokens));
    kvant_status status = exports_create(&e, s->n_blocks - first);
    if (status == KVANT_OK) {
        exports_list(&e, s, first, length + tokens);
        status = import_layers(cache, &e, at, left);
    }
    exports_free(&e);
    return status;
}

kvant_status kvant_sequence_import(kvant_cache *cache, int32_t sequence, const void *data,
                                   size_t bytes)
{
    kvant_sequence *s = kvant_sequence_of(cache, sequence);
    uint64_t tokens;
    KVANT_RETURN_IF(!s || !data, KVANT_ERR_ARGUMENT);
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++)
        if (s->lengths[layer] != s->lengths[0] || s->lengths[layer] % KVANT_PAGE_TOKENS)
            return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                              "the sequence does not end with a whole block of 64 tokens, so no "
                              "block can be imported after it");
    if (bytes < sizeof tokens)
        return damaged();
    memcpy(&tokens, data, sizeof tokens);
    if (tokens < 1 || tokens > UINT32_MAX)
        return damaged();
    const uint32_t length = s->lengths[0];
    const kvant_status status =
        import_blocks(cache, sequence, (uint32_t)tokens, (const uint8_t *)data + sizeof tokens,
                      bytes - sizeof tokens);
    if (status != KVANT_OK) {
        kvant_sequence_truncate(cache, sequence, length);
        return status;
    }
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++)
        s->lengths[layer] += (uint32_t)tokens;
    return KVANT_OK;
}
