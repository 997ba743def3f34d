/* rules.h - the numbers of the rules by which rows stay exact, wherever a cache lies. Kernels and
 * the Python package use the same numbers; tests/python/layouts.py compares them. */
#pragma once

/* The exact part of a sequence: its first 64 tokens, and its newest 64 to 128. More newest tokens
 * hardly lower the error. */
#define KVANT_EXACT_FIRST 64u
#define KVANT_EXACT_LEAST_NEWEST 64u
#define KVANT_EXACT_NEWEST 128u

/* The rows of a step that are exact until the step is over: 64 to 512, because prompts come in
 * batches of at most 512. A cache writes at most 512 rows together. */
#define KVANT_EXACT_LEAST_STEP 64u
#define KVANT_EXACT_STEP 512u

/* Blocks that are sealed at once, at most. A GPU encodes 8 blocks in hardly more time than one.
 * With more, the step that seals them takes longer than other steps. */
#define KVANT_PLAN_RUN 8u
