/* cuda_attention_stage.c - the blocks that a call of attention on a GPU reads, and their table.
 *
 * The kernels read a table with one entry per block, for keys and values alike: a sealed block or
 * an open one. Next to each entry is the id of the transform of the block's keys.
 *
 * If the kernels cannot read a block in place, it is gathered: copied to a pool of open pages that
 * keys and values share. There are two reasons.
 *
 *   pages    A block may be open for keys or values alone, or have different open pages for them.
 *            Then all open blocks are gathered.
 *
 *   centres  Kernels cannot add <q, centre> before a softcap, and know one centre of values. So
 *            with a softcap keys are gathered with their centre, and so are values with several
 *            centres. Then all blocks are gathered, which is slow but right.
 *
 * Queries, and the launch of the kernels, are cuda_attention.c's. */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "cuda_attention.h"

enum { SEALED, OPEN }; /* gather_list.state */

/* Blocks */

/* Only the first blocks of a sequence can be dropped. The blocks after them form a shorter sequence
 * in which tokens have the same distances. */
static uint32_t n_dropped(const kvant_sequence *s, uint32_t n)
{
    uint32_t first = 0;
    while (first < n && s->table[first] < 0)
        first++;
    return first;
}

uint32_t kvant_cuda_call_blocks(const attention_call *c)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < c->batch; i++) {
        const uint32_t n = (uint32_t)kvant_plan_blocks(sequence_of(c, i)->lengths[c->number]),
                       rest = n - n_dropped(sequence_of(c, i), n);
        most = rest > most ? rest : most;
    }
    return most;
}

size_t kvant_cuda_call_words(const attention_call *c)
{
    return c->n_blocks + (c->n_blocks + sizeof(int32_t) - 1) / sizeof(int32_t);
}

/* Makes staging large enough for the batch. Its former content is not kept. */
static kvant_status find_room(attention_call *c)
{
    cuda_memory *memory = c->memory;
    c->n_blocks = c->batch * c->stride;
    const size_t words = c->batch + 5 * (size_t)c->n_blocks + kvant_cuda_call_words(c);
    if (words > memory->staging_words) {
        kvant_free(memory->staging);
        /* Twice: the tables, and a copy of the tables that are on the device. */
        memory->staging = kvant_alloc(2 * words, sizeof *memory->staging);
        memory->staging_words = memory->staging ? words : 0;
        memory->n_copied = 0;
        KVANT_RETURN_IF(!memory->staging,
                        kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for tables"));
    }
    return kvant_cuda_grow(&memory->tables, memory->staging_words * sizeof(int32_t),
                           "allocating tables");
}

/* Writes lengths and blocks to the beginning of staging. */
static void find_blocks(attention_call *c)
{
    int32_t *lengths = c->memory->staging;
    c->blocks = lengths + c->batch;
    for (uint32_t i = 0; i < c->batch; i++) {
        const kvant_sequence *s = sequence_of(c, i);
        const uint32_t tokens = s->lengths[c->number], n = (uint32_t)kvant_plan_blocks(tokens),
                       first = n_dropped(s, n);
        c->dropped = first * KVANT_PAGE_TOKENS < tokens ? first * KVANT_PAGE_TOKENS : tokens;
        lengths[i] = (int32_t)(tokens - c->dropped);
        for (uint32_t j = 0; j < c->stride; j++)
            c->blocks[i * c->stride + j] = first + j < n ? s->table[first + j] : KVANT_NO_BLOCK;
    }
}

static bool is_there(const attention_call *c, uint32_t i)
{
    return c->blocks[i] >= 0;
}

/* Whether entry i is the block to which steps write the next row of its sequence. */
static bool is_next(const attention_call *c, uint32_t i)
{
    const uint32_t sequence = i / c->stride;
    return c->steps && i % c->stride == (uint32_t)c->memory->staging[sequence] / KVANT_PAGE_TOKENS;
}

/* Transforms */

static uint32_t transform_of(const attention_call *c, int role, uint32_t i)
{
    return c->layer->parts[role].tensor->blocks[c->blocks[i]].transform_id;
}

/* Adds a transform to the call. If a transform of keys has a matrix or a dense rotation, queries
 * must go through matrices, because the kernels do not know these. */
static void add_transform(attention_call *c, int role, uint32_t transform_id)
{
    call_transforms *of = &c->transforms;
    const cuda_transform v = kvant_cuda_transform(&c->layer->parts[role], transform_id);
    of->first[role] = of->used[role] ? of->first[role] : transform_id;
    of->used[role] |= 1u << transform_id;
    of->centred[role] |= v.center != NULL;
    of->scaled[role] |= v.scale != NULL;
    of->through |= role == KVANT_ROLE_K && (v.full || v.rotates);
}

/* Finds the transforms in use. Without blocks it takes transform 0; the output is then zeros. With
 * several scales of keys, queries go through matrices, because kernels multiply by one scale. A
 * tensor on a GPU has one scale of values (kvant_transforms_at_most); only a row that does not fit
 * into fp16 with it may bring another. */
static kvant_status find_transforms(attention_call *c)
{
    c->transforms = (call_transforms){ 0 };
    for (int role = 0; role < 2; role++) {
        for (uint32_t i = 0; i < c->n_blocks; i++)
            if (is_there(c, i) && !(c->transforms.used[role] >> transform_of(c, role, i) & 1))
                add_transform(c, role, transform_of(c, role, i));
        if (!c->transforms.used[role])
            add_transform(c, role, 0);
    }
    c->transforms.through |= has_several(c, KVANT_ROLE_K) && c->transforms.scaled[KVANT_ROLE_K];
    return has_several(c, KVANT_ROLE_V) && c->transforms.scaled[KVANT_ROLE_V]
               ? kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                            "cache on cuda: blocks of values have several scales, which attention "
                            "does not support: use a cache on the CPU")
               : KVANT_OK;
}

bool kvant_cuda_call_centers_back(const attention_call *c, int role)
{
    return c->transforms.centred[role] &&
           (role == KVANT_ROLE_K ? c->p->logit_softcap > 0 : has_several(c, role));
}

/* Tables */

static int32_t page_of(const attention_call *c, int role, uint32_t i)
{
    return kvant_cuda_page_of(&c->layer->parts[role], (uint32_t)c->blocks[i]);
}

static bool all_gathered(const attention_call *c)
{
    return kvant_cuda_call_centers_back(c, KVANT_ROLE_K) ||
           kvant_cuda_call_centers_back(c, KVANT_ROLE_V);
}

/* Whether some block's open pages cannot be read in place. */
static bool must_gather(const attention_call *c)
{
    if (all_gathered(c) || c->steps)
        return all_gathered(c) || !c->in_place;
    for (uint32_t i = 0; i < c->n_blocks; i++)
        if (is_there(c, i) && page_of(c, KVANT_ROLE_K, i) != page_of(c, KVANT_ROLE_V, i))
            return true;
    return false;
}

static bool is_open(const attention_call *c, uint32_t i)
{
    return page_of(c, KVANT_ROLE_K, i) >= 0 || page_of(c, KVANT_ROLE_V, i) >= 0;
}

static bool is_gathered(const attention_call *c, uint32_t i)
{
    return c->gathers && is_there(c, i) && (all_gathered(c) || is_next(c, i) || is_open(c, i));
}

/* The page to which steps write the next row of a sequence. */
static int32_t next_page(const attention_call *c, uint32_t sequence)
{
    return c->in_place ? (int32_t)c->layer->first_exact + c->in_place[sequence] : (int32_t)sequence;
}

static int32_t entry_of(attention_call *c, uint32_t i)
{
    if (is_next(c, i))
        return -1 - next_page(c, i / c->stride);
    if (!is_there(c, i)) /* after a sequence's last block, so it is not read */
        return 0;
    if (is_gathered(c, i))
        return -1 - (int32_t)c->n_gathered++;
    return is_open(c, i) ? -1 - page_of(c, KVANT_ROLE_K, i) : c->blocks[i];
}

/* If steps begin a new block, its rows have the transform of the block before it. */
static void make_table(attention_call *c)
{
    uint8_t *transforms = (uint8_t *)(c->table + c->n_blocks);
    c->gathers = must_gather(c);
    c->any_open = c->steps;
    c->n_gathered = c->steps && c->gathers ? c->batch : 0;
    for (uint32_t i = 0; i < c->n_blocks; i++) {
        const uint32_t at = i - (!is_there(c, i) && is_next(c, i));
        c->table[i] = entry_of(c, i);
        c->any_open |= c->table[i] < 0;
        transforms[i] = is_there(c, at) ? (uint8_t)transform_of(c, KVANT_ROLE_K, at) : 0;
    }
}

/* Fills a list. from: room for all blocks of the call; the targets follow n_blocks numbers
 * later. */
static void fill_list(attention_call *c, gather_list list, int32_t *from)
{
    int32_t *to = from + c->n_blocks;
    for (uint32_t i = 0; i < c->n_blocks; i++) {
        if (!is_gathered(c, i) || transform_of(c, list.role, i) != list.transform_id)
            continue;
        const int32_t page = page_of(c, list.role, i);
        if ((page >= 0 ? OPEN : SEALED) != list.state)
            continue;
        from[list.n] = page >= 0 ? page : c->blocks[i];
        to[list.n++] = -1 - c->table[i];
    }
    list.from = from;
    list.to = to;
    if (list.n)
        c->lists[c->n_lists++] = list;
}

/* The lists of a role name each block once, so all of them fit one after another. */
static void make_lists(attention_call *c, int32_t *at)
{
    for (int role = 0; role < 2 && c->gathers; role++) {
        int32_t *from = at + 2 * (size_t)role * c->n_blocks;
        for (uint32_t i = 0; i < 2 * KVANT_MAX_TRANSFORMS; i++) {
            const uint32_t before = c->n_lists;
            if (c->transforms.used[role] >> i / 2 & 1)
                fill_list(c, (gather_list){ .role = role, .state = i % 2, .transform_id = i / 2 },
                          from);
            from += c->n_lists > before ? c->lists[before].n : 0;
        }
    }
}

/* Writes the table and the lists to staging after the blocks, and copies it to the device. All
 * layers of a step have the same ones, so they are copied once. */
static kvant_status stage(attention_call *c)
{
    cuda_memory *memory = c->memory;
    int32_t *copied = memory->staging + memory->staging_words;
    c->table = c->blocks + c->n_blocks;
    memset(c->table, 0, kvant_cuda_call_words(c) * sizeof *c->table);
    int32_t *lists = c->table + kvant_cuda_call_words(c);
    make_table(c);
    make_lists(c, lists);
    c->lengths = memory->tables.at;
    c->on_device = c->lengths + (c->table - memory->staging);
    const size_t n = (size_t)(lists - memory->staging) + (c->n_lists ? 4 * c->n_blocks : 0),
                 bytes = n * sizeof *lists;
    if (n == memory->n_copied && memcmp(copied, memory->staging, bytes) == 0)
        return KVANT_OK;
    memcpy(copied, memory->staging, bytes);
    memory->n_copied = 0;
    KVANT_FORWARD(kvant_cuda_report_error(
        kvant_cuda_memory_copy(memory->tables.at, memory->staging, bytes, memory->stream),
        "copying tables"));
    memory->n_copied = n;
    return KVANT_OK;
}

/* The address on the device of a part of staging. */
static const int32_t *staged(const attention_call *c, const int32_t *at)
{
    return (const int32_t *)c->memory->tables.at + (at - c->memory->staging);
}

/* Gathered pages lie role after role and kv head after kv head, so that a decoded block is
 * contiguous per kv head. If nothing is gathered, there is room for one block, because the kernels
 * need a pool. */
kvant_cuda_pages kvant_cuda_call_pages(const attention_call *c, int role)
{
    const size_t page = c->layer->parts[role].tensor->open_page_bytes,
                 n = c->gathered->bytes / (2 * c->n_kv_heads * page);
    return (kvant_cuda_pages){ (uint8_t *)c->gathered->at + (size_t)role * c->n_kv_heads * n * page,
                               page, n * page };
}

static kvant_status decode(const attention_call *c, const gather_list *list)
{
    cuda_part *part = &c->layer->parts[list->role];
    const bool open = list->state == OPEN;
    const kvant_cuda_pages to = kvant_cuda_call_pages(c, list->role);
    const kvant_cuda_decode_args args = {
        .size = sizeof args,
        .codec = open ? part->open_codec : part->codec,
        .pages = kvant_cuda_pages_of(part, open),
        .blocks = staged(c, list->from),
        .n_blocks = list->n,
        .n_kv_heads = c->n_kv_heads,
        .type = KVANT_CUDA_F16,
        .out = to.base,
        .token_stride = c->head_dim,
        .head_stride = to.head_stride / sizeof(uint16_t),
        .center = kvant_cuda_call_centers_back(c, list->role)
                      ? kvant_cuda_transform(part, list->transform_id).rotated_center
                      : NULL,
        .centroids = open ? NULL : part->centroids,
        .to = staged(c, list->to),
        .transformed = 1
    };
    return kvant_cuda_report_error(kvant_cuda_decode(&args, c->memory->stream),
                                   "filling exact pages");
}

static kvant_status gather_pages(attention_call *c)
{
    const size_t page = c->layer->parts[0].tensor->open_page_bytes,
                 n = c->n_gathered ? c->n_gathered : 1;
    if (c->any_open)
        KVANT_FORWARD(
            kvant_cuda_grow(c->gathered, 2 * c->n_kv_heads * n * page, "allocating exact pages"));
    for (uint32_t i = 0; i < c->n_lists; i++)
        KVANT_FORWARD(decode(c, &c->lists[i]));
    return KVANT_OK;
}

kvant_status kvant_cuda_call_stage(attention_call *c)
{
    KVANT_FORWARD(find_room(c));
    find_blocks(c);
    KVANT_FORWARD(find_transforms(c));
    KVANT_FORWARD(stage(c));
    return gather_pages(c);
}
