/* ids.h - finds the slot of an id. Owns a hash table of slots. The ids lie in the caller's array,
 * by slot. The table uses open addressing and is at most half full. */
#pragma once

#include <kvant/kvant.h>

#define KVANT_NO_SLOT UINT32_MAX

typedef struct kvant_id_table {
    uint32_t *slots; /* slot + 1; 0: empty */
    size_t size;     /* a power of two, or 0 */
} kvant_id_table;

/* Makes room for n ids. KVANT_ERR_MEMORY: the table is unchanged. */
kvant_status kvant_id_table_reserve(kvant_id_table *table, const uint64_t *ids, size_t n);
void kvant_id_table_destroy(kvant_id_table *table);

uint32_t kvant_id_table_find(const kvant_id_table *table, const uint64_t *ids, uint64_t id);

/* Inserts the id of a slot, ids[slot]. It must not be in the table, and the table must have
 * room. */
void kvant_id_table_insert(kvant_id_table *table, const uint64_t *ids, uint32_t slot);

/* Erases an id, or moves it to another slot. The id must be in the table. */
void kvant_id_table_erase(kvant_id_table *table, const uint64_t *ids, uint64_t id);
void kvant_id_table_move(kvant_id_table *table, const uint64_t *ids, uint64_t id, uint32_t slot);
