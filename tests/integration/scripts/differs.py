"""Builds another model on one of the workers."""

from toy import Toy

import elastic

Toy(features=4 + elastic.init().local_rank).train()
