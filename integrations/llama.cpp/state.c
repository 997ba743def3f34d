/* state.c - see state.h. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "host.h"
#include "kv_store.h"
#include "kv_tensor.h"
#include "llama_states.h"
#include "state_restore.h"

static bool layout_create(kvp_state_layout *l, size_t n)
{
    *l = (kvp_state_layout){ .blocks = malloc(
                                 n * (sizeof(*l->blocks) + sizeof(*l->index) + sizeof(*l->runs))),
                             .n_cells = (uint32_t)n };
    if (l->blocks == NULL)
        return false;
    l->runs = (kvp_state_run *)(l->blocks + n);
    l->index = (uint32_t *)(l->runs + n);
    return true;
}

static void layout_free(kvp_state_layout *l)
{
    free(l->blocks);
}

static size_t list_bytes(const kvp_state_layout *l)
{
    return (size_t)kvp_state_list_bytes(l->n_blocks, l->n_runs);
}

/* Saving */

static uint32_t index_of(const kvp_kv *kv, uint32_t block)
{
    if (kv->remote != NULL)
        return kv->remote->block_state(kv, block).index;
    return kv->placement != NULL ? kvp_placement_block(kv->placement, block).index
                                 : block % (kvp_kv_blocks(&kv->shape) / kv->shape.n_streams);
}

/* The block's place in the list. Neighbouring cells are mostly in the newest block of the list. */
static uint32_t find_block(const kvp_kv *kv, kvp_state_layout *l, uint32_t block)
{
    for (uint32_t i = l->n_blocks; i > 0; i--)
        if (l->blocks[i - 1].block == block)
            return i - 1;
    l->blocks[l->n_blocks] = (kvant_block_slots){ .block = block };
    l->index[l->n_blocks] = index_of(kv, block);
    return l->n_blocks++;
}

/* n neighbouring cells lie in neighbouring slots of a block. */
static void add_slots(kvp_state_layout *l, uint32_t block, uint32_t slot, uint32_t n)
{
    kvp_state_run *last = l->n_runs > 0 ? &l->runs[l->n_runs - 1] : NULL;

    l->blocks[block].slots |= UINT64_MAX >> (KVANT_PAGE_TOKENS - n) << slot;
    if (last != NULL && last->block == block && (uint32_t)last->first + last->count == slot)
        last->count = (uint8_t)(last->count + n);
    else
        l->runs[l->n_runs++] =
            (kvp_state_run){ .block = block, .first = (uint8_t)slot, .count = (uint8_t)n };
}

/* How many of the next `left` cells certainly lie in the slots behind this one. Without a placement
 * cells are slots. */
static uint32_t count_neighbours(const kvp_kv *kv, uint32_t slot, size_t left)
{
    const uint32_t most = kv->placement == NULL ? KVANT_PAGE_TOKENS - slot : 1;

    return left < most ? (uint32_t)left : most;
}

static bool any_invalid(const kvp_kv *kv, size_t cell, size_t n)
{
    size_t i = 0;

    while (i < n && !kvp_invalid_has(&kv->invalid, cell + i))
        i++;
    return i < n;
}

static bool is_written(const kvp_kv *kv, const kvant_block_slots *b)
{
    kvant_block_info info = { .size = sizeof(info) };

    if (kv->remote != NULL)
        info.written = kv->remote->block_state(kv, b->block).written;
    else if (kvant_tensor_get_block(kv->tensor, b->block, 0, &info) != KVANT_OK)
        return false;
    return (info.written & b->slots) == b->slots;
}

/* Finds where the rows of n cells lie. False when a cell has no row. */
static bool find_rows(const kvp_kv *kv, size_t cell, size_t n, kvp_state_layout *l)
{
    for (size_t i = 0, some; i < n; i += some) {
        const int64_t slot = kvp_kv_slot(kv, (int64_t)(cell + i));
        const uint32_t first = (uint32_t)(slot % KVANT_PAGE_TOKENS);
        if (slot < 0)
            return false;
        some = count_neighbours(kv, first, n - i);
        if (any_invalid(kv, cell + i, some))
            return false;
        add_slots(l, find_block(kv, l, (uint32_t)(slot / KVANT_PAGE_TOKENS)), first,
                  (uint32_t)some);
    }
    for (uint32_t i = 0; i < l->n_blocks; i++)
        if (!is_written(kv, &l->blocks[i]))
            return false;
    return true;
}

static void write_lists(const kvp_state_layout *l, size_t record, uint8_t *out)
{
    kvp_state_header header = { .bytes = list_bytes(l) + record,
                                .n_cells = l->n_cells,
                                .n_blocks = l->n_blocks,
                                .n_runs = l->n_runs };
    uint8_t *at = out + sizeof(header);

    for (uint32_t i = 0; i < l->n_blocks; i++, at += sizeof(kvp_state_block)) {
        const kvp_state_block block = { .slots = l->blocks[i].slots, .index = l->index[i] };
        memcpy(at, &block, sizeof(block));
    }
    memcpy(at, l->runs, l->n_runs * sizeof(*l->runs));
    memcpy(header.magic, KVP_STATE_MAGIC, KVP_STATE_MAGIC_BYTES);
    header.check = kvp_state_check(&header, out + sizeof(header));
    memcpy(out, &header, sizeof(header));
}

static bool write_run(const kvp_kv *kv, const kvp_state_layout *l, size_t record, size_t room,
                      uint8_t *out)
{
    const size_t lists = list_bytes(l), kept = lists + record;
    uint8_t *to = kvp_saving_begin(out, kept, room);
    const kvant_status status =
        kv->remote != NULL
            ? kv->remote->export_record(kv, l->blocks, l->n_blocks, to + lists, record)
            : kvant_tensor_export_record(kv->tensor, l->blocks, l->n_blocks, to + lists, record,
                                         kvant_available_cpus());
    const bool done = status == KVANT_OK;

    if (done)
        write_lists(l, record, to);
    if (done && to == out)
        kvp_host_clear_foreign(out + kept, room - kept);
    kvp_saving_end(done);
    return done;
}

static bool find_size(const kvp_kv *kv, const kvp_state_layout *l, size_t *record)
{
    return (kv->remote != NULL
                ? kv->remote->record_size(kv, l->blocks, l->n_blocks, record)
                : kvant_tensor_record_size(kv->tensor, l->blocks, l->n_blocks, record)) == KVANT_OK;
}

bool kvp_state_read(const kvp_kv *kv, size_t cell, size_t n, void *out)
{
    const size_t room = n * kvp_kv_row_bytes(kv);
    size_t record = 0;
    kvp_state_layout l;
    bool done;

    if (kvp_kv_row_bytes(kv) < sizeof(kvp_state_header) || !layout_create(&l, n))
        return false;
    done =
        find_rows(kv, cell, n, &l) && find_size(kv, &l, &record) && list_bytes(&l) + record < room;
    if (done && kvp_saving_measures())
        kvp_saving_note(out, list_bytes(&l) + record, room);
    else if (done)
        done = write_run(kv, &l, record, room, out);
    layout_free(&l);
    return done;
}

/* Restoring */

static bool read_header(const uint8_t *data, size_t size, kvp_state_header *header)
{
    if (size < sizeof(*header) || memcmp(data, KVP_STATE_MAGIC, KVP_STATE_MAGIC_BYTES) != 0)
        return false;
    memcpy(header, data, sizeof(*header));
    return true;
}

/* Reads the lists of a run of n cells. Returns NULL, or the reason why they cannot be right. */
static const char *read_lists(kvp_state_restored *r, const uint8_t *data, size_t size, size_t n)
{
    const uint8_t *at = data + sizeof(kvp_state_header);
    kvp_state_layout *l = &r->l;
    kvp_state_header header;

    if (!read_header(data, size, &header) || header.n_cells != n || header.n_blocks > n ||
        header.n_runs > n || header.bytes != size)
        return "the head of the saved rows is damaged";
    l->n_blocks = header.n_blocks;
    l->n_runs = header.n_runs;
    if (list_bytes(l) > header.bytes || header.check != kvp_state_check(&header, at))
        return "the head of the saved rows is damaged";
    for (uint32_t i = 0; i < l->n_blocks; i++, at += sizeof(kvp_state_block)) {
        kvp_state_block block;
        memcpy(&block, at, sizeof(block));
        l->blocks[i] = (kvant_block_slots){ .slots = block.slots };
        l->index[i] = block.index;
    }
    memcpy(l->runs, at, l->n_runs * sizeof(*l->runs));
    r->record = data + list_bytes(l);
    r->bytes = header.bytes - list_bytes(l);
    return NULL;
}

/* Finds the block and the slot of each cell. False unless each slot of the blocks has one cell, and
 * each block has a slot. */
static bool find_places(kvp_state_restored *r)
{
    const kvp_state_layout *l = &r->l;
    uint64_t *left = malloc((l->n_blocks + 1) * sizeof(*left));
    size_t n = 0;
    bool ok = left != NULL;

    for (uint32_t i = 0; ok && i < l->n_blocks; i++) {
        left[i] = l->blocks[i].slots;
        ok = left[i] != 0;
    }
    for (uint32_t i = 0; ok && i < l->n_runs; i++) {
        const kvp_state_run *run = &l->runs[i];
        ok = run->block < l->n_blocks && (uint32_t)run->first + run->count <= KVANT_PAGE_TOKENS &&
             run->count <= l->n_cells - n;
        for (uint32_t slot = run->first; ok && slot < (uint32_t)run->first + run->count; slot++) {
            ok = (left[run->block] >> slot & 1) != 0;
            left[run->block] &= ~((uint64_t)1 << slot);
            r->rows[n] = (kvp_restored){ r->cells[n], run->block, slot };
            n++;
        }
    }
    for (uint32_t i = 0; ok && i < l->n_blocks; i++)
        ok = left[i] == 0;
    free(left);
    return ok && n == l->n_cells;
}

/* Finds the blocks here of the saved blocks, if their cells' slots are fixed. */
bool kvp_state_find_fixed(const kvp_state_restored *r, uint32_t *at)
{
    memset(at, 0xff, r->l.n_blocks * sizeof(*at));
    for (size_t i = 0; i < r->l.n_cells; i++) {
        const int64_t slot = kvp_kv_slot(r->kv, r->rows[i].cell);
        const uint32_t block = (uint32_t)(slot / KVANT_PAGE_TOKENS);
        if (slot % KVANT_PAGE_TOKENS != r->rows[i].slot)
            return false;
        if (at[r->rows[i].block] == UINT32_MAX)
            at[r->rows[i].block] = block;
        if (at[r->rows[i].block] != block)
            return false;
    }
    return true;
}

static bool find_blocks(kvp_state_restored *r)
{
    kvp_kv *kv = r->kv;
    uint32_t *at = malloc((r->l.n_blocks + 1) * sizeof(*at));
    bool ok = at != NULL &&
              (kv->placement != NULL ? kvp_placement_restore(kv->placement, r->rows, r->l.n_cells,
                                                             r->l.index, r->l.n_blocks, at)
                                     : kvp_state_find_fixed(r, at));

    for (uint32_t i = 0; ok && i < r->l.n_blocks; i++) {
        r->l.blocks[i].block = at[i];
        ok = kv->placement == NULL || kvp_kv_assign_block(kv, at[i]) == KVANT_OK;
    }
    free(at);
    return ok;
}

void kvp_state_begin(kvp_kv *kv, size_t cell, size_t n)
{
    kvp_restored_cells *cells = &kv->restored;
    bool alone;
    const unsigned state = kvp_restoring_number(&alone);

    if (state != cells->state)
        *cells = (kvp_restored_cells){ .state = state, .first = cell, .end = cell };
    cells->alone = alone || kv->shape.n_streams > 1;
    cells->first = cell < cells->first ? cell : cells->first;
    cells->end = cell + n > cells->end ? cell + n : cells->end;
}

/* Whether a slot has a row of the sequence that the state replaces. Each stream has one sequence.
 * Rows of this state may be between the cells that it wrote so far. With a placement, restored rows
 * get blocks of their own. */
static bool is_replaced(const kvp_kv *kv, uint32_t block, uint32_t slot)
{
    const uint32_t a_stream = kvp_kv_blocks(&kv->shape) / kv->shape.n_streams;
    const size_t cell = (size_t)(block / a_stream) * kv->shape.n_cells +
                        (size_t)(block % a_stream) * KVANT_PAGE_TOKENS + slot;

    return kv->placement == NULL && kv->restored.state != 0 && kv->restored.alone &&
           (cell < kv->restored.first || cell >= kv->restored.end);
}

/* Rows of other cells in the blocks that the record replaces. llama.cpp may have freed these cells.
 * The plug-in is told only when the program's functions are served. */
typedef struct others {
    int64_t *slots;
    float *rows;
    size_t n;
} others;

static bool others_read(const kvp_state_restored *r, others *o)
{
    const size_t width = r->kv->shape.row;
    kvant_block_info info = { .size = sizeof(info) };

    *o = (others){ .slots = malloc((r->l.n_blocks + 1) * KVANT_PAGE_TOKENS * sizeof(*o->slots)) };
    for (uint32_t i = 0; o->slots != NULL && i < r->l.n_blocks; i++) {
        const kvant_block_slots *b = &r->l.blocks[i];
        kvant_tensor_get_block(r->kv->tensor, b->block, 0, &info);
        for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
            if ((info.written & ~b->slots) >> slot & 1 && !is_replaced(r->kv, b->block, slot))
                o->slots[o->n++] = (int64_t)b->block * KVANT_PAGE_TOKENS + slot;
    }
    o->rows = o->slots != NULL ? malloc((o->n + 1) * width * sizeof(float)) : NULL;
    return o->rows != NULL && kvant_tensor_read_slots(r->kv->tensor, o->slots, o->n, o->rows, width,
                                                      kvant_available_cpus()) == KVANT_OK;
}

/* Makes cells invalid whose rows were in the replaced blocks and are lost. */
static void others_lose(const kvp_state_restored *r, const others *o)
{
    kvp_kv *kv = r->kv;
    const size_t n_cells = (size_t)kv->shape.n_cells * kv->shape.n_streams;
    kvp_refusal refusal = { .name = kv->name, .why = "out of memory" };

    for (size_t cell = n_cells; cell-- > 0;) {
        const int64_t slot = kvp_kv_slot(kv, (int64_t)cell);
        size_t i = 0;
        while (i < o->n && o->slots[i] != slot)
            i++;
        if (i == o->n)
            continue;
        kvp_invalid_set(&kv->invalid, cell, 1, true);
        refusal.cell = cell;
        refusal.n++;
    }
    if (refusal.n > 0)
        kvp_invalid_report(&refusal);
}

static void others_write(const kvp_state_restored *r, const others *o)
{
    if (o->n > 0 && kvant_tensor_write(r->kv->tensor, o->slots, o->n, o->rows, r->kv->shape.row,
                                       kvant_available_cpus()) != KVANT_OK)
        others_lose(r, o);
}

kvant_status kvp_state_import(const kvp_state_restored *r, kvant_tensor *tensor)
{
    return (kvp_restoring_is_checked(r->record, r->bytes) ? kvant_tensor_import_checked_record
                                                          : kvant_tensor_import_record)(
        tensor, r->l.blocks, r->l.n_blocks, r->record, r->bytes, kvant_available_cpus());
}

/* Puts the record's blocks in place of blocks of the tensor. KVANT_ERR_FULL: they have to be
 * decoded. */
static kvant_status import(kvp_state_restored *r)
{
    kvant_status status = KVANT_ERR_MEMORY;
    others o = { 0 };

    if (!find_blocks(r))
        return KVANT_ERR_FULL;
    if (others_read(r, &o)) {
        status = kvp_state_import(r, r->kv->tensor);
        /* without memory the blocks may be empty; after other errors they are unchanged */
        if (status == KVANT_OK || status == KVANT_ERR_MEMORY)
            others_write(r, &o);
    }
    free(o.slots);
    free(o.rows);
    return status;
}

/* Decodes rows of the record into floats and stores them like any rows. */
kvant_status kvp_state_store(const kvp_state_restored *r, const kvp_record_copy *c)
{
    const size_t width = r->kv->shape.row, most = KVP_MOST_CELLS;
    float *rows = malloc(most * width * sizeof(*rows));
    int64_t slots[KVP_MOST_CELLS];
    kvant_status status = rows != NULL ? KVANT_OK : KVANT_ERR_MEMORY;

    for (size_t done = 0, n; done < r->l.n_cells && status == KVANT_OK; done += n) {
        n = r->l.n_cells - done < most ? r->l.n_cells - done : most;
        for (size_t i = 0; i < n; i++)
            slots[i] =
                (int64_t)r->rows[done + i].block * KVANT_PAGE_TOKENS + r->rows[done + i].slot;
        status = kvant_tensor_read_slots(c->tensor, slots, n, rows, width, kvant_available_cpus());
        if (status == KVANT_OK)
            kvp_kv_store_rows(r->kv, r->cells + done, n, rows);
    }
    free(rows);
    return status;
}

/* The blocks do not fit here as they are: their cells' slots lie otherwise, or there is no room for
 * their transforms. Decodes them and stores their rows, which quantises them once more. */
static kvant_status decode(kvp_state_restored *r)
{
    kvp_record_copy c;
    kvant_status status = kvp_record_copy_create(
        kvp_kv_codecs(r->kv), r->kv->shape.row / r->kv->head_dim, r->l.n_blocks, &c);

    for (uint32_t i = 0; i < r->l.n_blocks; i++)
        r->l.blocks[i].block = i;
    if (status == KVANT_OK)
        status = kvp_state_import(r, c.tensor);
    if (status == KVANT_OK)
        status = kvp_state_store(r, &c);
    kvp_record_copy_free(&c);
    return status;
}

static void lose(kvp_kv *kv, const int64_t *cells, size_t n, const char *why)
{
    const kvp_refusal refusal = { .name = kv->name, .cell = (size_t)cells[0], .n = n, .why = why };

    for (size_t i = 0; i < n; i++)
        kvp_invalid_set(&kv->invalid, (size_t)cells[i], 1, true);
    if (!kvp_restoring_refuse(why))
        kvp_invalid_report(&refusal);
}

static kvant_status restore_rows(kvp_state_restored *r)
{
    kvant_status status;

    if (r->kv->remote != NULL)
        return kvp_state_restore_remote(r);
    status = import(r);
    if (status == KVANT_OK)
        for (size_t i = 0; i < r->l.n_cells; i++)
            kvp_invalid_set(&r->kv->invalid, (size_t)r->cells[i], 1, false);
    return status == KVANT_ERR_FULL || status == KVANT_ERR_UNSUPPORTED ? decode(r) : status;
}

/* Restores n cells from the head, the lists and the record of a run. */
static void restore(kvp_kv *kv, const int64_t *cells, size_t n, const uint8_t *bytes,
                    size_t n_bytes)
{
    kvp_state_restored r = { .kv = kv, .cells = cells, .rows = malloc(n * sizeof(*r.rows)) };
    const char *why = "out of memory";
    kvant_status status;

    if (r.rows != NULL && layout_create(&r.l, n)) {
        why = kvp_kv_ready(kv) ? read_lists(&r, bytes, n_bytes, n)
                               : "head_dim is not known yet; set KVANT_HEAD_DIM to the head_dim of "
                                 "the model";
        if (why == NULL && !find_places(&r))
            why = "the head of the saved rows is damaged";
        status = why == NULL ? restore_rows(&r) : KVANT_OK;
        if (status != KVANT_OK)
            why = status == KVANT_ERR_FORMAT ? kvant_error_message() : kvant_strerror(status);
        layout_free(&r.l);
    }
    free(r.rows);
    if (why != NULL)
        lose(kv, cells, n, why);
    kvp_kv_count(kv);
}

/* Runs that come in pieces */

void kvp_state_drop(kvp_kv *kv)
{
    free(kv->incoming.bytes);
    free(kv->incoming.cells);
    kv->incoming = (kvp_incoming){ 0 };
}

/* Begins a run of which `size` bytes are here. If it is whole, its bytes are not copied. False when
 * its header cannot be right, or when memory is short. */
static bool begin(kvp_kv *kv, const kvp_state_header *header, size_t size, const void *origin)
{
    size_t n = header->n_cells, total;
    const bool *fillers = kvp_restoring_fillers(origin, &n);
    kvp_incoming *in = &kv->incoming;

    kvp_state_drop(kv);
    total = n * kvp_kv_row_bytes(kv);
    if (header->n_cells == 0 || header->n_cells > n || n > kv->shape.n_cells ||
        header->bytes < sizeof(*header) || header->bytes > total)
        return false;
    *in = (kvp_incoming){ .bytes = size < total ? malloc(header->bytes) : NULL,
                          .cells = malloc(n * sizeof(*in->cells)),
                          .fillers = fillers,
                          .n_kept = header->bytes,
                          .total = total };
    if (in->cells != NULL && (in->bytes != NULL || size >= total))
        return true;
    kvp_state_drop(kv);
    return false;
}

/* Takes the fillers out of the run's cells. Returns the number of cells with rows. */
static size_t drop_fillers(kvp_kv *kv, size_t n_all)
{
    kvp_incoming *in = &kv->incoming;
    size_t n = 0;

    for (size_t i = 0; i < n_all; i++)
        if (in->fillers != NULL && in->fillers[i])
            kvp_invalid_set(&kv->invalid, (size_t)in->cells[i], 1, false);
        else
            in->cells[n++] = in->cells[i];
    return n;
}

static size_t append(kvp_kv *kv, size_t cell, const uint8_t *data, size_t size)
{
    const size_t row = kvp_kv_row_bytes(kv), left = kv->incoming.total - kv->incoming.have;
    kvp_incoming *in = &kv->incoming;

    size = (size < left ? size : left) / row * row;
    if (in->bytes != NULL && in->have < in->n_kept)
        memcpy(in->bytes + in->have, data,
               in->n_kept - in->have < size ? in->n_kept - in->have : size);
    for (size_t i = 0; i < size / row; i++)
        in->cells[in->have / row + i] = (int64_t)(cell + i);
    kvp_invalid_set(&kv->invalid, cell, size / row, true);
    in->have += size;
    if (in->have == in->total) {
        restore(kv, in->cells, drop_fillers(kv, in->total / row),
                in->bytes != NULL ? in->bytes : data, in->n_kept);
        kvp_state_drop(kv);
    }
    return size;
}

size_t kvp_state_write(kvp_kv *kv, size_t cell, const void *data, size_t size, const void *origin)
{
    const size_t row = kvp_kv_row_bytes(kv);
    const char *why = "the head of the saved rows is damaged, or memory is short";
    const int64_t here = (int64_t)cell;
    kvp_state_header header;

    if (size < row)
        return 0;
    if (row >= sizeof(header) && read_header(data, size, &header)) {
        if (begin(kv, &header, size, origin))
            return append(kv, cell, data, size);
        lose(kv, &here, 1, why);
        return row;
    }
    return kv->incoming.cells != NULL ? append(kv, cell, data, size) : 0;
}

size_t kvp_state_before_record(const kvp_kv *kv, const void *data, size_t size)
{
    const size_t row = kvp_kv_row_bytes(kv);
    size_t at = row;

    while (at < size &&
           (size - at < KVP_STATE_MAGIC_BYTES ||
            memcmp((const char *)data + at, KVP_STATE_MAGIC, KVP_STATE_MAGIC_BYTES) != 0))
        at += row;
    return at < size ? at : size;
}
