/* search_cases.h - rows as cells, and the paths that the CPU's portable trellis search finds for
 * them. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct search_case {
    int kind;
    uint32_t bits, n_levels;
    int32_t per_deviation;
    int8_t levels[64];
    uint16_t cells[512];                         /* cell of each step */
    uint8_t bit[512], subset[512], nearest[512]; /* the path, step by step */
} search_case;

/* Makes case i for codes of `bits` bits. */
void search_case_make(uint32_t bits, uint32_t steps, int i, search_case *c);

#ifdef __cplusplus
}
#endif
