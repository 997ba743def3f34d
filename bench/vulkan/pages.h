/* pages.h - the keys and values of one layer as int-4 pages in a Vulkan device's memory, written
 * and read by the shaders of this folder. Rows, queries and outputs are in memory that the CPU
 * sees, because an engine with another VkDevice shares no other memory. */
#ifndef VULKAN_PAGES_H
#define VULKAN_PAGES_H

#include <kvant/codec.h>

#include "gpu.h"

typedef struct shape {
    uint32_t sequences, heads, kv_heads, head_dim, tokens;
} shape;

typedef struct pages {
    shape of;
    uint32_t blocks, most_rows; /* blocks of a sequence; rows of a call */
    kvant_codec *codec[2];      /* int-4 of keys and values, of the library */
    size_t page_bytes[2];
    gpu_shader set_rows, attention, combine;
    gpu_buffer store[2], rows[2], slots, refused, table, q, parts, out;
    gpu_push push;
} pages;

/* Zeroed pages for the shape; attention is left out if head_dim is no multiple of 64. About
 * `workgroups` workgroups compute attention. */
pages pages_new(const char *shaders, const shape *of, uint32_t most_rows, uint32_t workgroups);
void pages_free(pages *p);
/* Bytes of all pages of a role. */
size_t pages_bytes(const pages *p, int role);
/* Records SET_ROWS of n rows of keys and values, and attention. */
void pages_record_rows(const pages *p, uint32_t n);
void pages_record_attention(const pages *p);
/* Stores n rows, which are in p->rows and p->slots. False: one was refused, and none is stored. */
bool pages_set_rows(const pages *p, uint32_t n);

#endif
