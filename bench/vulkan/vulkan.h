/* vulkan.h - the two parts of bench_vulkan, and their random numbers. */
#ifndef VULKAN_VULKAN_H
#define VULKAN_VULKAN_H

#include "pages.h"

/* Equal on every machine. */
uint32_t random_bits(void);
/* Between 0 and 1. */
float random_unit(void);
/* About normal: mean 0, variance 1. */
float random_normal(void);
/* 0 to n - 1 in random order. */
void random_order(uint32_t *numbers, uint32_t n);

/* Compare SET_ROWS, or attention, with the library and print each case. False at the first
 * difference. */
bool check_all_rows(const char *shaders);
bool check_all_attention(const char *shaders);

typedef struct times_options {
    shape shape;
    uint32_t workgroups, rounds, threads;
} times_options;

/* Times the shaders next to the library on the CPU. Prints JSON. */
void time_shaders(const char *shaders, const times_options *options);

#endif
