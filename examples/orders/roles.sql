-- Two roles: the owner of the tables, and the workers, which cannot change them. Run once, as an administrator.
\set ON_ERROR_STOP on
\getenv owner_password OWNER_PASSWORD
\getenv worker_password WORKER_PASSWORD
CREATE ROLE shop_owner LOGIN PASSWORD :'owner_password';
CREATE ROLE shop_worker LOGIN PASSWORD :'worker_password';
ALTER DATABASE :"DBNAME" OWNER TO shop_owner;
-- For tables that the owner creates later, those of idemp included.
ALTER DEFAULT PRIVILEGES FOR ROLE shop_owner GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO shop_worker;
ALTER DEFAULT PRIVILEGES FOR ROLE shop_owner GRANT USAGE ON SEQUENCES TO shop_worker;
