"""Create the tables of the shop, as their owner. A second run changes nothing."""

from shop import metadata

from idemp import Settings
from idemp.sql.engine import Database

metadata.create_all(Database(Settings().database_url).engine)
