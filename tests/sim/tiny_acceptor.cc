// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/tiny_acceptor.h"

#include <memory>

#include "services/base/check.h"
#include "tests/sim/scenario.h"

namespace isthmus::sim {

const router::Acceptor& TinyAcceptor() {
  static const std::unique_ptr<router::Acceptor> acceptor = [] {
    router::RouterConfig config;
    config.checkpoint = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
    config.request_timeout = Scenario::kRequestTimeout;
    auto created = router::Acceptor::Create(config);
    ISTHMUS_CHECK(created.ok());
    return *std::move(created);
  }();
  return *acceptor;
}

}  // namespace isthmus::sim
