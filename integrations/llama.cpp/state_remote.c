/* state_remote.c - runs of saved states that come back to the memory of another device (kvp_remote
 * of kv_tensor.h). Blocks come with their codes where the device takes them. It does not take
 * blocks with other rows, and transforms without a place; their rows are decoded. */
#include "state_restore.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "align.h"
#include "llama_states.h"
#include "log.h"

/* Says once for a state that rows are quantised once more. */
static void report_decoded(const kvp_kv *kv)
{
    static atomic_uint last;
    bool alone;
    const unsigned number = kvp_restoring_number(&alone);

    if (number != 0 ? atomic_exchange(&last, number) != number
                    : kv->shape.role == KVANT_ROLE_K && kvp_kv_is_first(kv))
        kvp_info("%s: some rows of a saved state are decoded and quantised once more, because they "
                 "lie otherwise in the cache or the cache has other transforms",
                 kv->name);
}

/* Lists the cells whose blocks were not taken, and moves their rows to the front. */
static size_t list_left(kvp_state_restored *r, int64_t *cells, const bool *taken)
{
    size_t n = 0;

    for (size_t i = 0; i < r->l.n_cells; i++) {
        if (taken[r->rows[i].block]) {
            kvp_invalid_set(&r->kv->invalid, (size_t)r->cells[i], 1, false);
            continue;
        }
        r->rows[n] = r->rows[i];
        cells[n++] = r->cells[i];
    }
    return n;
}

/* Decodes the rows that are left, by a copy of the record. A record of a CPU may have other
 * rotations than the device's codecs. */
static kvant_status store_left(const kvp_state_restored *r, const kvant_codec *const *codecs,
                               const kvp_state_layout *all)
{
    kvp_state_restored whole = *r;
    kvp_record_copy c;
    kvant_status status =
        kvp_record_copy_create(codecs, r->kv->shape.row / r->kv->head_dim, all->n_blocks, &c);

    for (uint32_t i = 0; i < all->n_blocks; i++)
        whole.l.blocks[i].block = i;
    if (status == KVANT_OK)
        status = kvp_state_import(&whole, c.tensor);
    if (status == KVANT_OK)
        status = kvp_state_store(r, &c);
    if (status == KVANT_OK)
        report_decoded(r->kv);
    kvp_record_copy_free(&c);
    return status;
}

/* Whether the blocks fit the cells: without rows of other sequences, which may be gone. These are
 * forgotten if no other sequence has tokens, or if the stream has one sequence. */
static bool fits(const kvp_state_restored *r, uint32_t *at)
{
    bool alone, ok = kvp_state_find_fixed(r, at);
    const bool known = kvp_restoring_number(&alone) != 0;

    for (uint32_t i = 0; i < r->l.n_blocks && ok && known && !alone && r->kv->shape.n_streams == 1;
         i++)
        ok = (r->kv->remote->block_state(r->kv, at[i]).written & ~r->l.blocks[i].slots) == 0;
    return ok;
}

/* Whether the state will be restored once more to other cells. */
static bool moves(const kvp_state_restored *r, bool fit)
{
    kvp_align_place *places = malloc((r->l.n_cells + 1) * sizeof(*places));
    bool again;

    for (uint32_t i = 0; places != NULL && i < r->l.n_cells; i++)
        places[i] = (kvp_align_place){ r->cells[i], r->rows[i].slot,
                                       i == 0 || r->rows[i].block != r->rows[i - 1].block };
    again = places != NULL && kvp_restoring_note(r->kv, places, r->l.n_cells, fit);
    free(places);
    return again;
}

/* Puts as many blocks of the record as possible in place of the device's, and decodes the rest. */
static kvant_status place(kvp_state_restored *r, uint32_t *at, bool *taken, int64_t *cells)
{
    const kvp_remote *remote = r->kv->remote;
    const kvant_codec *const *codecs = remote->codecs(r->kv);
    const kvp_state_layout all = r->l;
    kvant_status status = KVANT_OK;

    if (moves(r, fits(r, at)))
        return KVANT_OK;
    if (kvp_state_find_fixed(r, at)) {
        for (uint32_t i = 0; i < all.n_blocks; i++)
            r->l.blocks[i].block = at[i];
        status = remote->restore(r->kv, r->l.blocks, all.n_blocks, r->record, r->bytes,
                                 kvp_restoring_is_checked(r->record, r->bytes), taken);
    }
    r->l.n_cells = (uint32_t)list_left(r, cells, taken);
    r->cells = cells;
    if (status == KVANT_ERR_FORMAT && codecs != kvp_kv_codecs(r->kv))
        return store_left(r, kvp_kv_codecs(r->kv), &all);
    if (status != KVANT_OK && status != KVANT_ERR_FULL && status != KVANT_ERR_UNSUPPORTED)
        return status;
    return r->l.n_cells > 0 ? store_left(r, codecs, &all) : KVANT_OK;
}

kvant_status kvp_state_restore_remote(kvp_state_restored *r)
{
    const size_t room = (size_t)r->l.n_blocks + 1;
    uint32_t *at = malloc(room * sizeof(*at));
    bool *taken = calloc(room, sizeof(*taken));
    int64_t *cells = malloc((r->l.n_cells + 1) * sizeof(*cells));
    const kvant_status status = at != NULL && taken != NULL && cells != NULL
                                    ? place(r, at, taken, cells)
                                    : KVANT_ERR_MEMORY;

    free(at);
    free(taken);
    free(cells);
    return status;
}
