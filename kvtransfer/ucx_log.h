// SPDX-License-Identifier: Apache-2.0
// What UCX itself has to say goes into our log; its own default is plain text on stdout.
#pragma once

namespace isthmus::transfer {

// Errors and warnings of UCX become records with from=ucx. Further calls do nothing.
void RouteUcxLog();

}  // namespace isthmus::transfer
