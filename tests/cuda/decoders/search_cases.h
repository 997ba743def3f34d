/* search_cases.h - rows as cells, and what the CPU's portable search finds for them. */
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
    uint16_t cells[512];                         /* of steps */
    uint8_t bit[512], subset[512], nearest[512]; /* of the path */
} search_case;

/* Case i of codes of so many bits. */
void search_case_make(uint32_t bits, uint32_t steps, int i, search_case *c);

#ifdef __cplusplus
}
#endif
