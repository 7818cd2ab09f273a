// SPDX-License-Identifier: Apache-2.0
// Marks a function that kernels call as well as the host.
#pragma once

#ifdef __CUDACC__
#define ISTHMUS_HOST_DEVICE __host__ __device__
#else
#define ISTHMUS_HOST_DEVICE
#endif
