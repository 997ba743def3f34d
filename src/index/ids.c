/* ids.c - see ids.h. */
#include "ids.h"

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/random.h"

static size_t home(const kvant_id_table *table, uint64_t id)
{
    return (size_t)kvant_splitmix64(&id) & (table->size - 1);
}

/* The place of the id in the table, or the empty place at which a search for it ends. */
static size_t place_of(const kvant_id_table *table, const uint64_t *ids, uint64_t id)
{
    size_t at = home(table, id);
    while (table->slots[at] && ids[table->slots[at] - 1] != id)
        at = (at + 1) & (table->size - 1);
    return at;
}

uint32_t kvant_id_table_find(const kvant_id_table *table, const uint64_t *ids, uint64_t id)
{
    return table->size ? table->slots[place_of(table, ids, id)] - 1 : KVANT_NO_SLOT;
}

void kvant_id_table_insert(kvant_id_table *table, const uint64_t *ids, uint32_t slot)
{
    table->slots[place_of(table, ids, ids[slot])] = slot + 1;
}

void kvant_id_table_move(kvant_id_table *table, const uint64_t *ids, uint64_t id, uint32_t slot)
{
    table->slots[place_of(table, ids, id)] = slot + 1;
}

/* Moves ids after the gap into it, unless an id would come before its home place. */
void kvant_id_table_erase(kvant_id_table *table, const uint64_t *ids, uint64_t id)
{
    const size_t mask = table->size - 1;
    size_t gap = place_of(table, ids, id);
    for (size_t at = (gap + 1) & mask; table->slots[at]; at = (at + 1) & mask) {
        const size_t wanted = home(table, ids[table->slots[at] - 1]);
        if (((at - wanted) & mask) >= ((at - gap) & mask)) {
            table->slots[gap] = table->slots[at];
            gap = at;
        }
    }
    table->slots[gap] = 0;
}

kvant_status kvant_id_table_reserve(kvant_id_table *table, const uint64_t *ids, size_t n)
{
    kvant_id_table larger = { NULL, 64 };
    while (larger.size < 2 * n)
        larger.size *= 2;
    if (larger.size <= table->size)
        return KVANT_OK;
    larger.slots = kvant_alloc(larger.size, sizeof *larger.slots);
    KVANT_RETURN_IF(!larger.slots, KVANT_ERR_MEMORY);
    for (size_t i = 0; i < table->size; i++)
        if (table->slots[i])
            kvant_id_table_insert(&larger, ids, table->slots[i] - 1);
    kvant_id_table_destroy(table);
    *table = larger;
    return KVANT_OK;
}

void kvant_id_table_destroy(kvant_id_table *table)
{
    kvant_free(table->slots);
    *table = (kvant_id_table){ NULL, 0 };
}
