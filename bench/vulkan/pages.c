/* pages.c - see pages.h. */
#include "pages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PARTS = 1024 }; /* of combine.comp */

static kvant_codec *new_codec(uint32_t head_dim, kvant_role role, size_t *page_bytes)
{
    kvant_codec *codec = NULL;
    kvant_codec_info info = { .size = sizeof info };
    char why[256];

    if (kvant_codec_create("int-4", head_dim, role, 1, &codec, why, sizeof why) != KVANT_OK ||
        kvant_codec_get_info(codec, &info) != KVANT_OK) {
        fprintf(stderr, "vulkan: int-4 failed: %s\n", why);
        exit(1);
    }
    *page_bytes = info.page_bytes;
    return codec;
}

size_t pages_bytes(const pages *p, int role)
{
    return (size_t)p->of.sequences * p->blocks * p->of.kv_heads * p->page_bytes[role];
}

static uint32_t divide_up(uint32_t n, uint32_t by)
{
    return (n + by - 1) / by;
}

static void cut(pages *p, uint32_t workgroups)
{
    const uint32_t heads = p->of.sequences * p->of.kv_heads;
    const uint32_t wanted = divide_up(workgroups, heads);
    const uint32_t parts = wanted < MOST_PARTS ? wanted : MOST_PARTS;

    p->push = (gpu_push){ .page_words = { (uint32_t)p->page_bytes[0] / 4,
                                          (uint32_t)p->page_bytes[1] / 4 },
                          .kv_heads = p->of.kv_heads,
                          .n_tokens = p->of.tokens,
                          .blocks = p->blocks,
                          .part_pages = divide_up(p->blocks, parts) };
    p->push.parts = divide_up(p->blocks, p->push.part_pages);
}

static void load_shaders(pages *p, const char *shaders)
{
    const uint32_t d = p->of.head_dim;

    p->set_rows = gpu_new_shader(shaders, "set_rows", 6, d, 0);
    if (d % 64 == 0) {
        p->attention = gpu_new_shader(shaders, "attention", 5, d, p->of.heads / p->of.kv_heads);
        p->combine = gpu_new_shader(shaders, "combine", 2, d, 0);
    }
}

pages pages_new(const char *shaders, const shape *of, uint32_t most_rows, uint32_t workgroups)
{
    const size_t out = (size_t)of->sequences * of->heads, d = of->head_dim;
    pages p = { .of = *of, .blocks = divide_up(of->tokens, 64), .most_rows = most_rows };

    for (int role = 0; role < 2; role++)
        p.codec[role] = new_codec(of->head_dim, (kvant_role)role, &p.page_bytes[role]);
    cut(&p, workgroups);
    load_shaders(&p, shaders);
    for (int role = 0; role < 2; role++) {
        p.store[role] = gpu_new_buffer(pages_bytes(&p, role), false);
        p.rows[role] = gpu_new_buffer(sizeof(float) * most_rows * of->kv_heads * d, true);
    }
    p.slots = gpu_new_buffer(sizeof(uint32_t) * most_rows, true);
    p.refused = gpu_new_buffer(sizeof(uint32_t), true);
    p.table = gpu_new_buffer(sizeof(uint32_t) * of->sequences * p.blocks, true);
    p.q = gpu_new_buffer(sizeof(float) * out * d, true);
    p.out = gpu_new_buffer(sizeof(float) * out * d, true);
    p.parts = gpu_new_buffer(sizeof(float) * out * p.push.parts * (d + 2), false);
    gpu_begin();
    gpu_fill(&p.store[0], 0);
    gpu_fill(&p.store[1], 0);
    gpu_end();
    gpu_run();
    return p;
}

void pages_free(pages *p)
{
    gpu_buffer *buffers[] = { &p->store[0], &p->store[1], &p->rows[0], &p->rows[1], &p->slots,
                              &p->refused,  &p->table,    &p->q,       &p->parts,   &p->out };

    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        gpu_free_buffer(buffers[i]);
    for (int role = 0; role < 2; role++)
        kvant_codec_free(&p->codec[role]);
    gpu_free_shader(&p->set_rows);
    gpu_free_shader(&p->attention);
    gpu_free_shader(&p->combine);
}

void pages_record_rows(const pages *p, uint32_t n)
{
    const gpu_buffer *buffers[] = { &p->rows[0],  &p->rows[1], &p->store[0],
                                    &p->store[1], &p->slots,   &p->refused };
    gpu_push push = p->push;

    push.check = 1;
    gpu_dispatch(&p->set_rows, buffers, &push, n, p->of.kv_heads, 2);
    push.check = 0;
    gpu_dispatch(&p->set_rows, buffers, &push, n, p->of.kv_heads, 2);
}

void pages_record_attention(const pages *p)
{
    const gpu_buffer *in[] = { &p->q, &p->store[0], &p->store[1], &p->table, &p->parts };
    const gpu_buffer *out[] = { &p->parts, &p->out };

    gpu_dispatch(&p->attention, in, &p->push, p->of.kv_heads, p->push.parts, p->of.sequences);
    gpu_dispatch(&p->combine, out, &p->push, p->of.sequences * p->of.heads, 1, 1);
}

bool pages_set_rows(const pages *p, uint32_t n)
{
    uint32_t *refused = p->refused.at;

    *refused = 0;
    gpu_begin();
    pages_record_rows(p, n);
    gpu_end();
    gpu_run();
    return *refused == 0;
}
