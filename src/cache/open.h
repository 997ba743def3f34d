/* open.h - the pool of open (fp16) page groups, for codecs whose blocks span tokens. */
#ifndef KVANT_CACHE_OPEN_H
#define KVANT_CACHE_OPEN_H

#include "cells.h"

/* The page of a kv head in a slot. */
void *kvant_open_page(const kvant_cells *cells, int32_t slot, uint32_t kv_head);

/* Makes the group open: takes a slot (sealing another group when none is free) and decodes what the group holds. */
kvant_status kvant_open_group(kvant_cells *cells, size_t group);

/* Seals an open group: its cells are encoded, unwritten ones as copies of a written one so that they widen no range. The
 * group stays open when a row does not fit the codec. */
kvant_status kvant_seal_group(kvant_cells *cells, size_t group);

/* Gives group target of to (sealed, empty) a slot with the bytes of a slot of from. */
kvant_status kvant_open_copy(const kvant_cells *from, int32_t slot, kvant_cells *to, size_t target);

#endif
