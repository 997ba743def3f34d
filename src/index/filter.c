/* filter.c - evaluates the filters of a query to a bit per slot. */
#include "../base/alloc.h"
#include "index_internal.h"

static void pass(uint32_t *passes, size_t slot)
{
    passes[slot / 32] |= 1u << slot % 32;
}

static bool is_used(const kvant_index *index, size_t slot)
{
    if (!index->n_lists)
        return slot < index->n;
    return kvant_index_slot(index, index->ids[slot]) == slot;
}

static void ask(const kvant_index *index, const kvant_index_query *query, uint32_t *passes)
{
    for (size_t slot = 0; slot < kvant_index_packs(index) * 32; slot++)
        if (passes[slot / 32] >> slot % 32 & 1 &&
            !query->allow(query->allow_context, kvant_index_id(index, slot)))
            passes[slot / 32] &= ~(1u << slot % 32);
}

kvant_status kvant_index_filter(const kvant_index *index, const kvant_index_query *query,
                                uint32_t **passes)
{
    *passes = NULL;
    if (!query->allowed && !query->allow)
        return KVANT_OK;
    *passes = kvant_alloc(kvant_index_packs(index) + 1, sizeof **passes);
    KVANT_RETURN_IF(!*passes, KVANT_ERR_MEMORY);
    for (size_t slot = 0; !query->allowed && slot < kvant_index_packs(index) * 32; slot++)
        if (is_used(index, slot))
            pass(*passes, slot);
    for (size_t i = 0; query->allowed && i < query->n_allowed; i++) {
        const uint32_t slot = kvant_index_slot(index, query->allowed[i]);
        if (slot != KVANT_NO_SLOT)
            pass(*passes, slot);
    }
    if (query->allow)
        ask(index, query, *passes);
    return KVANT_OK;
}
