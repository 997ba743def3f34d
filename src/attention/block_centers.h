/* block_centers.h - the term that scores lack in blocks with their own centres (cache/center.h).
 *
 * The term is the product of a query and the block's centre, which rotates with the block's
 * position. The cosines and sines of all positions are computed once per call, the products with
 * the centre at position 0 once per query. */
#pragma once

#include "work_item.h"

/* Fills the phases of all pages (plan->phases). Computing the phase of every page would cost more
 * than the products with it. Blocks are mostly consecutive, and then all chunks share the phases of
 * the first blocks. */
void kvant_attention_fill_phases(const kvant_attention_plan *plan, float *phases);

/* Sets the work item's offsets for a page of the current view. */
void kvant_attention_find_offsets(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                  kvant_attention_item *item, uint32_t page);
